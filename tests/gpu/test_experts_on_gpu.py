"""The expert kernels on a GPU (NVIDIA; written for H200) against their twins, in sweeps over tilings and row counts."""

import pytest
import torch

pytest.importorskip("triton")

import experts_cases as cases

from truegate.kernels import sizes
from truegate.kernels.experts import experts
from truegate.kernels.permute import permute
from truegate.kernels.ref.permute import permute as twin
from truegate.law.faults import FAULTS
from truegate.law.placement import place
from truegate.law.plan import Choices
from truegate.law.spec import Activation, RoutingSpec
from truegate.moe.backends import choose, compile_layer
from truegate.moe.basis import Instrument, Step
from truegate.moe.layer import MoELayer
from truegate.moe.mutants import LAYERS, SIZES, outcomes
from truegate.moe.selftest import self_test

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
TILINGS = {
    "rows": cases.tiling("rows", 1, 4, 512, stages=1),
    "rows staged": cases.tiling("rows", 1, 8, 128, stages=3),
    "inline": cases.tiling("inline", 16, 32, 128, stages=3),
    "16": cases.tiling("ordered", 16, 64, 128, stages=3),
    "32": cases.tiling("ordered", 32, 64, 64, stages=3),
    "64": cases.tiling("ordered", 64, 64, 64, stages=3),
    "64 tma": cases.tiling("ordered", 64, 128, 64, stages=3, tma=True),
    "128 tma": cases.tiling("ordered", 128, 128, 64, stages=3, warps=8, tma=True),
    "128 halved": cases.tiling("ordered", 128, 128, 64, stages=3, warps=8, halve=True),
    "128 tma halved": cases.tiling("ordered", 128, 128, 64, stages=3, warps=8, tma=True, halve=True),
    "128 split": cases.tiling("ordered", 128, 128, 64, stages=3, warps=8, tma=True, halve=True, split=True),
    "128 tma persistent": cases.tiling("ordered", 128, 128, 64, stages=3, warps=8, tma=True, persistent=1, halve=True),
}


def rows_of(path):
    return (1, 2) if path.startswith("rows") else (2, 5, 30) if path == "inline" else (3, 17, 65, 130, 400)


@pytest.mark.parametrize("path", TILINGS)
@pytest.mark.parametrize(("hidden", "width"), [(256, 192), (512, 256), (200, 136)], ids=["even", "tiles", "uneven"])
def test_experts_are_their_twin_at_every_tiling(path, hidden, width):
    one = cases.layer(16, hidden, width, dtype=torch.bfloat16, device="cuda", unused=(3, 15))
    for num_rows in rows_of(path):
        for crowd in (False, True):
            x, ids, weights = cases.rows(one, num_rows, 3, seed=num_rows, crowd=crowd)
            got = cases.run(one, TILINGS[path], x, ids, weights)
            assert cases.worst(got, cases.reference(one, x, ids, weights)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("path", ["128 split", "128 tma persistent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_programs_that_take_many_tiles(path, dtype):
    one = cases.layer(24, 512, 256, dtype=dtype, device="cuda", unused=(3, 23))
    for num_rows in (2100, 6001):  # either way of `permute`
        x, ids, weights = cases.rows(one, num_rows, 6, seed=num_rows)
        got = cases.run(one, TILINGS[path], x, ids, weights)
        assert cases.worst(got, cases.reference(one, x, ids, weights)) < TOLERANCE[dtype]


@pytest.mark.parametrize("path", ["16", "128 tma halved", "128 split"])
def test_an_activation_from_outside_stands_between_the_products(path):
    """As planted faults hand one in: the first product is then not gated, and is read in the order it is written in."""
    one = cases.layer(5, 512, 256, dtype=torch.bfloat16, device="cuda", unused=(1,))
    x, ids, weights = cases.rows(one, 400, 3)
    silu = torch.nn.functional.silu
    got = experts(x, one.gate_up, one.down, one.biases, ids, weights, one.sizes, TILINGS[path],
                  activate=lambda gate, up: silu(gate) * up)  # fmt: skip
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("path", ["64", "128 tma", "128 tma persistent", "128 split"])
def test_columns_one_part_after_the_other_are_all_columns(path, monkeypatch):
    one = cases.layer(16, 1280, 256, dtype=torch.bfloat16, device="cuda", unused=(3, 15))
    for num_rows in (130, 2100):
        inputs = cases.rows(one, num_rows, 6, seed=num_rows)
        whole = cases.run(one, TILINGS[path], *inputs)
        assert cases.worst(whole, cases.reference(one, *inputs)) < TOLERANCE[torch.bfloat16]
        with monkeypatch.context() as patch:
            patch.setattr(sizes, "OUT_BYTES", num_rows * 6 * 2 * 512)
            assert len(sizes.columns_at_once(num_rows * 6, 1280, 2)) == 3
            assert torch.equal(cases.run(one, TILINGS[path], *inputs), whole)


def test_warps_that_copy_and_warps_that_multiply_never_miss_each_other():
    """Many launches beside other work, which moves them against each other: always the same numbers."""
    one = cases.layer(24, 512, 256, dtype=torch.bfloat16, device="cuda")
    inputs = cases.rows(one, 3000, 6)
    first, busy = cases.run(one, TILINGS["128 split"], *inputs, poison=False), torch.randn((4096, 4096), device="cuda")
    beside = torch.cuda.Stream()
    for i in range(200):
        with torch.cuda.stream(beside):
            busy[: 512 * (i % 8 + 1)] @ busy
        assert torch.equal(cases.run(one, TILINGS["128 split"], *inputs, poison=False), first)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_rows_whose_slots_are_mostly_elsewhere(bias):
    one = cases.layer(16, 256, 192, dtype=torch.bfloat16, device="cuda", bias=bias, sparse=True)
    for seed in range(6):
        x, ids, weights = cases.rows(one, 1, 8, seed=seed, drop=0.8)
        got = cases.run(one, TILINGS["rows"], x, ids, weights)
        assert cases.worst(got, cases.reference(one, x, ids, weights)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("path", ["rows", "inline", "16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", Activation, ids=str)
@pytest.mark.parametrize("at_input", [False, True], ids=["output", "input"])
def test_activations_biases_sides_and_dtypes(path, dtype, activation, at_input):
    config = TILINGS[path] if dtype is torch.float16 else cases.tiling(TILINGS[path].path, 16, 32, 32)
    one = cases.layer(4, 128, 64, dtype=dtype, device="cuda", activation=activation, at_input=at_input, bias=True)
    x, ids, weights = cases.rows(one, 6, 2)
    got = cases.run(one, config, x, ids, weights)
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("num_rows", "slots", "num_slots"),
    [(1, 8, 7), (700, 3, 64), (4097, 8, 300), (20001, 8, 32), (9001, 8, 128), (500, 8, 512), (9001, 8, 512)],
)
def test_permute_is_a_stable_sort_whose_tiles_cover_it(num_rows, slots, num_slots):
    ids = torch.randint(-3, num_slots + 3, (num_rows, slots)).to(torch.int32)
    got = permute(ids.cuda(), num_slots, 64)
    valid = (ids >= 0) & (ids < num_slots)
    key = torch.where(valid, ids, num_slots).flatten().argsort(stable=True)[: int(valid.sum())]
    assert torch.equal(got.order_N[: len(key)].cpu(), key.to(torch.int32))
    found = [(e, s) for e, s in zip(got.tile_expert_Q.tolist(), got.tile_start_Q.tolist(), strict=True) if e >= 0]
    assert found == twin(ids, num_slots, 64)[1]


def layer_of(family, *, dtype=torch.bfloat16, fuse_shared=False, **changed) -> MoELayer:
    spec, backends = RoutingSpec(family=family, **{**SIZES, **LAYERS[family], **changed}), choose(experts="triton")
    plan = compile_layer(spec, backends, place(num_experts=spec.num_experts), Choices(fuse_shared=fuse_shared))
    return MoELayer(plan, backends, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", LAYERS)
def test_the_self_test_passes_on_the_kernels(family, dtype):
    for fused in (False, True) if LAYERS[family].get("shared") is not None else (False,):
        report = self_test(layer_of(family, dtype=dtype, fuse_shared=fused))
        assert report.ok, report.sentence


@pytest.mark.parametrize("part", range(8))
def test_every_fault_is_caught_through_the_kernels(part):
    backends = choose(experts="triton")
    for outcome in outcomes(layers_each=1, backends=backends, device="cuda", faults=FAULTS[part::8]):
        assert outcome.caught_by, f"{outcome.fault.name} in {outcome.layer} was not seen"


def at_every_row_count(layer, part: int, instrument: Instrument):
    """(y_TD, what the same rows gave one at a time) at every fourth T up to 1025, from 1 + part on."""
    x_TD = instrument.rows(1025)

    def run(x):
        return layer(x, Step(torch.zeros(len(x), dtype=torch.int64, device="cuda"), None, True))

    alone_TD = torch.cat([run(x_TD[t : t + 1]) for t in range(1025)])
    for num_rows in range(1 + part, 1026, 4):
        yield run(x_TD[:num_rows]), alone_TD[:num_rows]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("part", range(4))
def test_coefficients_at_every_row_count_are_those_of_one_row(family, part):
    layer = layer_of(family, dtype=torch.float32)
    instrument = Instrument(layer)
    instrument.measure(instrument.rows(1))  # writes the read-out
    for together_TD, alone_TD in at_every_row_count(layer, part, instrument):
        torch.testing.assert_close(together_TD, alone_TD, rtol=2e-6, atol=1e-6)


QWEN3 = {"num_experts": 128, "top_k": 8, "hidden": 2048, "expert_intermediate": 768}


@pytest.mark.parametrize("part", range(4))
def test_coefficients_of_a_tuned_size_at_every_row_count_are_those_of_one_row(part):
    """bf16 at the sizes of tuned.json, which has ten tilings between 1 row and 1025; within one last place."""
    layer = layer_of("qwen3_moe", **QWEN3)
    if "H200" in torch.cuda.get_device_name():
        assert len({layer.experts.config(num_rows, 8) for num_rows in range(1, 1026)}) >= 9
    instrument = Instrument(layer)
    for num_rows in (1025, 1):
        assert instrument.measure(instrument.rows(num_rows)).error <= 1e-2
    for together_TD, alone_TD in at_every_row_count(layer, part, instrument):
        away_T = (together_TD.float() - alone_TD.float()).abs().amax(1) / alone_TD.float().abs().amax(1)
        assert float(away_T.max()) <= torch.finfo(torch.bfloat16).eps, f"{len(away_T)} rows, row {int(away_T.argmax())}"


def test_a_captured_graph_runs_other_rows_and_ids():
    for path, num_rows in (("rows", 1), ("inline", 7), ("16", 40), ("64 tma", 130), ("128 split", 900)):
        one = cases.layer(16, 512, 256, dtype=torch.bfloat16, device="cuda")
        first, second = (cases.rows(one, num_rows, 3, seed=s) for s in (1, 2))
        live = [t.clone() for t in first]
        cases.run(one, TILINGS[path], *live, poison=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cases.run(one, TILINGS[path], *live, poison=False)
        for scene in (second, first):
            for to, value in zip(live, scene, strict=True):
                to.copy_(value)
            graph.replay()
            assert torch.equal(y, cases.run(one, TILINGS[path], *scene))
