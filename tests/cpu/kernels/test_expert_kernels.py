"""The expert kernels, interpreted, are their twins at every path and read nothing that no valid slot names."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels run interpreted where triton is installed")

import experts_cases as cases

from truegate.kernels import by_rows, combine, grouped, permute, sizes, tuning
from truegate.kernels.ref import combine as ref_combine
from truegate.kernels.ref import grouped as ref_grouped
from truegate.kernels.ref.permute import permute as twin
from truegate.law.spec import Activation

PATHS = {
    "rows": cases.tiling("rows", 1, 16, 16),
    "inline": cases.tiling("inline", 16, 16, 16),
    "ordered": cases.tiling("ordered", 16, 16, 16),
    "persistent": cases.tiling("ordered", 16, 16, 16, persistent=1),
    "copy engine": cases.tiling("ordered", 16, 16, 16, tma=True),
    "halved": cases.tiling("ordered", 32, 16, 16, halve=True, tma=True),
}


@pytest.mark.parametrize(
    ("path", "num_rows", "slots"),
    [*((path, 3, 3) for path in PATHS), ("rows", 1, 2), ("inline", 9, 2), ("ordered", 20, 2)],
)
def test_experts_are_their_twin(path, num_rows, slots):
    one = cases.layer(5, 24, 20, unused=(1,))  # 24 and 20: neither a multiple of the tile
    x, ids, weights = cases.rows(one, num_rows, slots)
    got = cases.run(one, PATHS[path], x, ids, weights)
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < 1e-6


@pytest.mark.parametrize("path", ["rows", "ordered"])
@pytest.mark.parametrize("activation", Activation, ids=str)
@pytest.mark.parametrize("at_input", [False, True], ids=["output", "input"])
def test_activations_biases_and_both_sides_of_the_weight(path, activation, at_input):
    one = cases.layer(3, 16, 16, activation=activation, at_input=at_input, bias=True)
    x, ids, weights = cases.rows(one, 4, 2)
    got = cases.run(one, PATHS[path], x, ids, weights)
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < 2e-6


@pytest.mark.parametrize("path", ["rows", "inline", "ordered"])
def test_narrow_dtypes_accumulate_in_fp32(path):
    """fp16: the interpreter multiplies bf16 as if its bits were integers; tests/gpu has it."""
    one = cases.layer(3, 32, 16, dtype=torch.float16)
    x, ids, weights = cases.rows(one, 3, 2)
    got = cases.run(one, PATHS[path], x, ids, weights)
    assert got.dtype == torch.float16
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < 1e-2


@pytest.mark.parametrize(("at_input", "bias"), [(False, True), (True, False)])
def test_rows_whose_slots_are_mostly_elsewhere(at_input, bias):
    one = cases.layer(3, 16, 16, at_input=at_input, bias=bias, sparse=True)
    x, ids, weights = cases.rows(one, 2, 3, drop=0.6)
    got = cases.run(one, PATHS["rows"], x, ids, weights)
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < 1e-6


@pytest.mark.parametrize("path", ["inline", "ordered", "persistent", "halved"])
def test_an_expert_with_more_rows_than_a_tile(path):
    one = cases.layer(4, 16, 16)
    x, ids, weights = cases.rows(one, 20 if path == "inline" else 41, 1, crowd=True, drop=0.1)
    got = cases.run(one, PATHS[path], x, ids, weights)
    assert cases.worst(got, cases.reference(one, x, ids, weights)) < 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_nothing_valid_gives_zeros(path):
    one = cases.layer(3, 16, 16, unused=(0, 1, 2))
    x = torch.full((3, 16), cases.NAN)
    ids = torch.tensor([[-1, 3], [7, -5], [3, 3]], dtype=torch.int32)
    assert (cases.run(one, PATHS[path], x, ids, torch.full((3, 2), cases.NAN)) == 0).all()


@pytest.mark.parametrize(
    ("path", "num_rows", "launches"), [("rows", 1, 2), ("inline", 3, 3), ("ordered", 20, 4), ("ordered", 513, 6)]
)
def test_launches_of_each_path(path, num_rows, launches):
    one, seen = cases.layer(9, 16, 16), []
    modules = (by_rows, combine, grouped, permute)
    kernels = [k for module in modules for k in vars(module).values() if hasattr(k, "pre_run_hooks")]
    for kernel in kernels:
        kernel.add_pre_run_hook(lambda *_, **__: seen.append(1))
    try:
        cases.run(one, PATHS[path], *cases.rows(one, num_rows, 8))
    finally:
        for kernel in kernels:
            kernel.pre_run_hooks.clear()
    assert len(seen) == launches


TILED = [path for path in PATHS if path != "rows"]


def product(one, path, a, ids, weights, *, order, first, gated=False, some=slice(None)):
    """One grouped product of a layer, some of its columns: what it leaves unwritten is NaN."""
    w, bias = (one.gate_up, one.biases[0]) if first else (one.down, one.biases[1])
    config = PATHS[path]
    with cases.poisoned_memory():
        return grouped.grouped_gemm(
            a, w[:, some], None if bias is None else bias[:, some], weights, ids, order, one.sizes, config.block_m,
            config.gate_up if first else config.down, first=first, gated=gated,
        )  # fmt: skip


def scene_of_products(path, *, at_input, bias):
    """A layer, rows and their order; the valid assignments, and where the rows of h stand that belong to them."""
    one = cases.layer(5, 24, 20, at_input=at_input, bias=bias, unused=(1,))
    x, ids, weights = cases.rows(one, 9 if path == "inline" else 24, 3)
    config = PATHS[path]
    order = permute.permute(ids, 5, config.block_m) if config.path == "ordered" else None
    if order is None:
        numbers = ((ids >= 0) & (ids < 5)).flatten().nonzero()[:, 0]
        return one, (x, ids, weights), None, numbers, numbers
    numbers = twin(ids, 5, config.block_m)[0].long()
    return one, (x, ids, weights), order, numbers, torch.arange(len(numbers))


def agree(got, want, at) -> None:
    """The rows `at` are want, all others were left alone."""
    assert cases.worst(got[at], want) < 1e-6
    others = torch.ones(len(got), dtype=torch.bool)
    others[at] = False
    assert got[others].isnan().all()


@pytest.mark.parametrize("path", TILED)
@pytest.mark.parametrize(("at_input", "bias"), [(False, True), (True, False)], ids=["output", "input"])
def test_the_first_product_is_its_twin(path, at_input, bias):
    one, (x, ids, weights), order, numbers, places = scene_of_products(path, at_input=at_input, bias=bias)
    more = {"at_input": at_input}
    want = ref_grouped.gate_up(x, one.gate_up, one.biases[0], weights, ids, one.sizes.activation, None, **more)
    agree(product(one, path, x, ids, weights, order=order, first=True, gated=True), want[numbers], places)
    each = x.repeat_interleave(3, 0) * (weights.flatten()[:, None] if at_input else 1.0)
    plain = ref_grouped.down(each, one.gate_up, one.biases[0], weights, ids, at_output=False)
    agree(product(one, path, x, ids, weights, order=order, first=True), plain[numbers], places)


@pytest.mark.parametrize("path", TILED)
@pytest.mark.parametrize(("at_input", "bias"), [(False, True), (True, False)], ids=["output", "input"])
def test_the_second_product_is_its_twin_in_any_of_its_columns(path, at_input, bias):
    one, (_, ids, weights), order, numbers, places = scene_of_products(path, at_input=at_input, bias=bias)
    h_NF = torch.randn((ids.numel(), 20), generator=torch.Generator().manual_seed(3))
    held_NF = torch.full_like(h_NF, cases.NAN)
    held_NF[places] = h_NF[numbers]
    want = ref_grouped.down(h_NF, one.down, one.biases[1], weights, ids, at_output=not at_input)
    for some in (slice(None), slice(5, 23)):
        got = product(one, path, held_NF, ids, weights, order=order, first=False, some=some)
        agree(got, want[numbers][:, some], numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "slots", "hidden"), [(5, 3, 24), (2, 8, 300), (257, 2, 1030)])
def test_combine_is_its_twin_and_writes_its_columns_alone(num_rows, slots, hidden, dtype):
    ids = torch.randint(-2, 7, (num_rows, slots), generator=torch.Generator().manual_seed(hidden)).to(torch.int32)
    out_ND = torch.randn((num_rows * slots, hidden), generator=torch.Generator().manual_seed(1)).to(dtype)
    out_ND[((ids < 0) | (ids >= 5)).flatten()] = cases.NAN
    wider = torch.full((num_rows, hidden + 9), cases.NAN, dtype=dtype)
    y_TD = wider[:, 4 : 4 + hidden]
    assert combine.combine(out_ND, ids, 5, y_TD) is y_TD
    want = ref_combine.combine(out_ND, ids, 5)
    # one rounding of the sum, from fp32
    torch.testing.assert_close(y_TD, want.to(dtype), rtol=1e-6 if dtype is torch.float32 else 1e-3, atol=1e-6)
    assert wider[:, :4].isnan().all()
    assert wider[:, 4 + hidden :].isnan().all()


@pytest.mark.parametrize(("num_rows", "slots"), [(300, 4), (1100, 4)])  # either way of `permute`
def test_permute_of_512_experts(num_rows, slots):
    check_permute(torch.randint(-2, 514, (num_rows, slots), generator=torch.Generator().manual_seed(512)), 512, 16)


@pytest.mark.parametrize(("num_rows", "slots"), [(1, 1), (7, 3), (150, 2), (700, 2), (2100, 8)])
@pytest.mark.parametrize("block_m", [16, 64])
def test_permute_is_a_stable_sort_by_expert_and_its_tiles_cover_it(num_rows, slots, block_m):
    num_slots = 9
    ids = torch.randint(-2, num_slots + 2, (num_rows, slots), generator=torch.Generator().manual_seed(num_rows))
    ids[ids == 4] = 5  # an expert without rows
    check_permute(ids, num_slots, block_m)


def check_permute(ids, num_slots, block_m) -> None:
    ids = ids.to(torch.int32)
    got = permute.permute(ids, num_slots, block_m)
    order, tiles = twin(ids, num_slots, block_m)
    assert torch.equal(got.order_N[: len(order)], order)
    found = [(e, s) for e, s in zip(got.tile_expert_Q.tolist(), got.tile_start_Q.tolist(), strict=True) if e >= 0]
    assert found == tiles
    rows = [r for e, r in zip(got.tile_expert_Q.tolist(), got.tile_rows_Q.tolist(), strict=True) if e >= 0]
    assert sum(rows) == len(order)
    assert max(rows) <= block_m


def test_a_tiling_is_the_tuned_one_nearest_in_rows_an_expert():
    shape = {"width": 8, "num_slots": 128, "hidden": 2048, "expert_width": 768, "share": 1.0, "element_size": 2}
    assert tuning.config_of("NVIDIA H200", num_rows=1, **shape).path == "rows"
    assert tuning.config_of("NVIDIA H200", num_rows=7, **shape) == tuning.config_of("NVIDIA H200", num_rows=8, **shape)
    assert tuning.config_of("NVIDIA H200", num_rows=9000, **shape).block_m == 128
    fused = {**shape, "width": 9, "num_slots": 129}  # with a shared slot: the same sizes, so the same table
    assert tuning.config_of("NVIDIA H200", num_rows=4000, **fused).block_m == 128
    other = {**shape, "hidden": 999}
    assert tuning.config_of("NVIDIA H200", num_rows=8, **other) == tuning.default(8, 8, 128, 1.0, 2)
    for num_rows in (2, 15, 16, 17, 300):  # programs that look at all ids are for few
        config = tuning.config_of("NVIDIA H200", num_rows=num_rows, **shape)
        assert config.path != "inline" or num_rows * 8 <= 256
    assert tuning.from_json(tuning.to_json(tuning.ROWS)) == tuning.ROWS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("path", TILED)
def test_columns_one_part_after_the_other_are_all_columns(path, bias, monkeypatch):
    """Three parts, the last narrower and no multiple of a tile."""
    one = cases.layer(5, 530, 24, bias=bias, unused=(2,))
    inputs = cases.rows(one, 11, 3)
    whole = cases.run(one, PATHS[path], *inputs)
    monkeypatch.setattr(sizes, "OUT_BYTES", 11 * 3 * 4 * 300)
    assert [part.stop for part in sizes.columns_at_once(33, 530, 4)] == [256, 512, 530]
    assert torch.equal(cases.run(one, PATHS[path], *inputs), whole)
    assert cases.worst(whole, cases.reference(one, *inputs)) < 1e-6


@pytest.mark.parametrize(
    ("num_rows", "hidden", "parts"),
    [
        (6400, 2048, [2048]), (6401, 2048, [1024, 2048]), (16512, 2048, [512, 1024, 1536, 2048]),
        (1 << 20, 2048, [*range(256, 2049, 256)]), (4096, 7168, [1792, 3584, 5376, 7168]),
        (16384, 7168, [*range(1024, 7169, 1024)]),
    ],
)  # fmt: skip
def test_parts_of_a_long_steps_columns_are_alike_and_few(num_rows, hidden, parts):
    """All but the last are within the limit of bytes."""
    found = sizes.columns_at_once(num_rows * 8, hidden, 2)
    assert [part.stop for part in found] == parts
    assert [part.start for part in found] == [0, *parts[:-1]]
