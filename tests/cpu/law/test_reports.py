"""Two public reports, as the laws they broke. All through public functions, nothing patched.

1. The scaling law: a factor folded by the router is multiplied by nobody again, so the shared slot's weight is 1.
2. The order law: padding is neutral, whether or not load balancing is on.
T tokens, E = 256 experts, R = 8 ranks, L = 32 slots a rank, S = 1 fused shared slot, J = K + S.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from truegate.errors import Refused
from truegate.law.families import specs_of
from truegate.law.order import decode, realise, to_local
from truegate.law.placement import place
from truegate.law.plan import Choices, Ranks
from truegate.law.select import coefficients, select
from truegate.moe.backends import Backends, choose, compile_layer, load, names
from truegate.moe.layer import MoELayer

V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 7168,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
E, K, L, R = 256, 8, 32, 8


def plan_of(*, experts, dispatch, router=None, redundant=0, ep=R, fuse=True, **choices):
    backends = choose(experts=experts, dispatch=dispatch, router=router)
    placement = place(num_experts=E, num_ranks=ep, num_redundant=redundant)
    return compile_layer(
        specs_of(V3)[0], backends, placement, Choices(ranks=Ranks(dp=ep, ep=ep), fuse_shared=fuse, **choices)
    )


def rows(num_rows=24, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_rows, E)), 0.2 * rng.normal(size=E)


def routed_by(plan, logits, bias, **kwargs):
    """What the plan's router emits (aiter's has multiplied by 2.5 already), laid out."""
    ids, weights = select(plan.spec, logits, bias_E=bias, scaled=plan.router.name == "aiter")
    home = np.arange(len(ids)) % plan.placement.num_ranks
    return realise(plan, ids, weights, home_T=home, **kwargs), ids, weights, home


def test_a_scale_folded_by_the_router_leaves_the_shared_weight_at_one():
    plan = plan_of(experts="aiter", dispatch="mori")
    assert plan.router.name == "aiter"  # the one that goes with the experts
    s = plan.scales
    assert (s.shared, s.folded, s.later, s.shared_copies) == (1, 2.5, 1, 1)
    routed, _, weights, _ = routed_by(plan, *rows())
    assert (routed.weights_TJ[:, :K] == weights).all()  # routed weights untouched
    assert (routed.weights_TJ[:, K] == 1.0).all()


@pytest.mark.parametrize(("scale_at", "shared", "last"), [("weights", 1.0, 1.0), ("output", 1 / 2.5, 2.5)])
def test_the_shared_weight_is_one_over_what_multiplies_later(scale_at, shared, last):
    plan = plan_of(experts="deep_gemm", dispatch="deepep_normal", scale_at=scale_at)
    assert (float(plan.scales.shared), float(plan.scales.later)) == (shared, last)
    assert plan.finish(1.0, None) == last  # the last multiply is the plan's
    routed, _, weights, _ = routed_by(plan, *rows())
    np.testing.assert_array_equal(routed.weights_TJ[:, :K], weights * (2.5 / last))
    assert (routed.weights_TJ[:, K] == shared).all()


@pytest.mark.parametrize(("experts", "dispatch"), [("aiter", "mori"), ("deep_gemm", "deepep_normal")])
def test_ids_are_33_a_rank_with_the_shared_slot_last(experts, dispatch):
    plan = plan_of(experts=experts, dispatch=dispatch)
    assert (plan.slots_per_rank, plan.send.num_slots) == (33, 33 * R)
    routed, ids, _, home = routed_by(plan, *rows())
    np.testing.assert_array_equal(routed.ids_TJ[:, :K], ids // L * 33 + ids % L)
    np.testing.assert_array_equal(routed.ids_TJ[:, K], home * 33 + 32)
    for rank in range(R):
        local, weights = to_local(plan, routed.ids_TJ, routed.weights_TJ, rank=rank, home_T=home)
        here = weights != 0
        np.testing.assert_array_equal(here[:, :K], ids // L == rank)
        np.testing.assert_array_equal(here[:, K], home == rank)
        assert (local[:, K][home == rank] == 32).all()


LAID_OUT = ((True, 0, R), (False, 0, R), (True, 32, R), (True, 0, 1), (False, 8, 1))  # fused, redundant, ep


def test_c_is_the_definition_for_every_combination_that_compiles():
    logits, bias = rows()
    want = coefficients(specs_of(V3)[0], logits, bias_E=bias)
    compiled, said = [], []
    for experts in names("experts"):
        for dispatch in names("dispatch"):
            for router in (None, *names("routers")):
                for scale_at in ("weights", "output"):
                    for fuse, redundant, ep in LAID_OUT:
                        try:
                            plan = plan_of(
                                experts=experts, dispatch=dispatch, router=router, scale_at=scale_at, fuse=fuse,
                                redundant=redundant, ep=ep,
                            )  # fmt: skip
                        except Refused as error:
                            said.append(str(error))
                            continue
                        compiled.append((experts, dispatch))
                        if plan.router is None:
                            continue  # the kernel routes: nothing of ours to decode
                        c = decode(plan, routed_by(plan, logits, bias)[0])
                        np.testing.assert_allclose(c, want, rtol=0, atol=1e-12, err_msg=f"{experts} {dispatch}")
    assert {e for e, _ in compiled} == set(names("experts"))
    assert {d for _, d in compiled} == set(names("dispatch"))
    assert all("--" in line for line in said)


def test_a_router_that_folds_and_a_later_multiply_do_not_meet_by_accident():
    """The fault itself, in numbers: with b = 1 a shared weight of 1/2.5 would make the shared expert count 0.4."""
    plan = plan_of(experts="aiter", dispatch="mori")
    routed, ids, _, _ = routed_by(plan, *rows())
    broken = routed.weights_TJ.copy()
    broken[:, K] = 1 / 2.5
    c = decode(plan, replace(routed, weights_TJ=broken))
    assert np.allclose(c[:, E], 0.4)
    np.testing.assert_allclose(np.take_along_axis(c, ids, 1).sum(1), 2.5)


# The second report, run: every backend that can run on a CPU, through a whole layer.
TINY = {
    **V3, "hidden_size": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip
POISONS = {"nan": float("nan"), "1e30": 1e30, "-inf": float("-inf"), "zero": 0.0}
MASKS = {
    "mid": [1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1], "end": [1] * 7 + [0] * 5, "all": [0] * 12, "none": [1] * 12,
    "one row": [1], "one padded row": [0], "two rows": [0, 1],
}  # fmt: skip


def backends_here(name):
    """torch's experts, or the torch twin that enforces aiter's contract, behind the exchange that needs no one else."""
    if name == "torch":
        return choose(experts="torch", dispatch="local")
    aiter = load("experts", "aiter")
    twin = SimpleNamespace(CONTRACT=aiter.CONTRACT, build=aiter.build_twin)
    return Backends(router=load("routers", "torch"), experts=twin, dispatch=load("dispatch", "local"))


def layer_of(kernel, redundant, fuse, dtype, config=TINY):
    spec = specs_of(config)[0]
    placement = place(num_experts=spec.num_experts, num_redundant=redundant)
    backends = backends_here(kernel)
    layer = MoELayer(
        compile_layer(spec, backends, placement, Choices(fuse_shared=fuse)), backends, dtype=dtype
    ).requires_grad_(False)
    fill = torch.Generator().manual_seed(1)
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=fill) * 0.3)
    for expert in range(spec.num_experts):  # replicas of an expert are the same expert
        gate, up, down = (torch.randn(shape, generator=fill) * 0.3 for shape in ((64, 32), (64, 32), (32, 64)))
        layer.load_expert(expert, gate=gate, up=up, down=down)
    return layer


def batch(valid, recorder=None):
    valid_T = torch.tensor(valid, dtype=torch.bool)
    return SimpleNamespace(valid_T=valid_T, all_valid=bool(valid_T.all()), token_ids_T=None, recorder=recorder)


@pytest.mark.parametrize("kernel", ["torch", "aiter twin"])
@pytest.mark.parametrize("redundant", [0, 8], ids=["no replicas", "replicas"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "beside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_is_neutral_with_load_balancing_on_and_off(kernel, redundant, fuse, dtype):
    layer = layer_of(kernel, redundant, fuse, dtype)
    for mask, valid in MASKS.items():
        valid_T = torch.tensor(valid, dtype=torch.bool)
        clean = torch.randn((len(valid), 32), generator=torch.Generator().manual_seed(2)).to(dtype)
        want = layer(clean, batch(valid))
        assert want[valid_T].isfinite().all()
        for poison, value in POISONS.items():
            x = torch.where(valid_T[:, None], clean, torch.tensor(value, dtype=dtype))
            got = layer(x, batch(valid))
            assert torch.equal(got[valid_T], want[valid_T]), f"{mask}, {poison}"


@pytest.mark.parametrize("kernel", ["torch", "aiter twin"])
@pytest.mark.parametrize("redundant", [0, 8], ids=["no replicas", "replicas"])
def test_padded_rows_never_reach_an_illegal_id_and_are_never_load(kernel, redundant):
    layer = layer_of(kernel, redundant, True, torch.float32)
    valid = MASKS["mid"]
    valid_T = torch.tensor(valid, dtype=torch.bool)
    logits = torch.randn((12, 16), generator=torch.Generator().manual_seed(5))
    want = layer.router(logits, valid=valid_T, count=True)
    assert int(want.load_E.sum()) == int(want.load_P.sum()) == 4 * sum(valid)
    for value in POISONS.values():
        got = layer.router(torch.where(valid_T[:, None], logits, value), valid=valid_T, count=True)
        for field in ("ids_TJ", "weights_TJ", "load_E", "load_P"):
            assert torch.equal(getattr(got, field), getattr(want, field)), field
    pads = want.ids_TJ[~valid_T]
    if kernel == "torch":
        assert (pads == -1).all()
    else:  # legal, weightless, and spread instead of piled on expert 0
        spread = torch.arange(12 * 5).reshape(12, 5) % layer.plan.slots_per_rank
        assert torch.equal(pads.long(), spread[~valid_T])
    assert (want.weights_TJ[~valid_T] == 0).all()


def test_valid_rows_do_not_know_that_there_is_padding():
    """As close as one matmul of other shape allows: rows alone against the same rows between padded ones."""
    for kernel in ("torch", "aiter twin"):
        layer = layer_of(kernel, 8, True, torch.float32)
        x = torch.randn((6, 32), generator=torch.Generator().manual_seed(7))
        valid = [0, 1, 1, 0, 1, 0, 1, 1, 1, 0]
        padded = torch.full((10, 32), float("nan"))
        padded[torch.tensor(valid, dtype=torch.bool)] = x
        got = layer(padded, batch(valid))[torch.tensor(valid, dtype=torch.bool)]
        torch.testing.assert_close(got, layer(x, batch([1] * 6)), rtol=1e-5, atol=1e-5)
