"""The route kernel, interpreted, is its twin: every routing function and every rule of the order law."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels run interpreted where triton is installed")

import broken_route_cases as broken
import route_cases as cases

from truegate.kernels.route import Route

PLANS = cases.plans()
STARTS = ("fused", "identity", "replicas", "four", "weights")
PADDED = ("v3 fused", "hash", *(name for name in PLANS if name.startswith(STARTS)))


@pytest.mark.parametrize(("name", "invalid"), [*((name, False) for name in PLANS), *((name, True) for name in PADDED)])
def test_route_is_its_twin(name, invalid):
    plan = PLANS[name]
    inputs = cases.scene(plan, 6, device="cpu", coarse=True, invalid=invalid)
    cases.check(plan, inputs, device="cpu")


GROUPED = [name for name, plan in PLANS.items() if plan.spec.groups is not None]


@pytest.mark.parametrize("name", GROUPED)
def test_rows_without_ties_are_decided_among_the_kept_groups_alone(name):
    plan = PLANS[name]
    cases.check(plan, cases.scene(plan, 4, device="cpu", coarse=False, invalid=True, distinct=True), device="cpu")


@pytest.mark.parametrize(("name", "constant", "value"), broken.CONSTANTS_OF_THE_EDGE)
def test_a_broken_constant_of_the_edge_is_not_the_twin(name, constant, value):
    plan, route = PLANS[name], Route(PLANS[name])
    broken.break_constant(route, constant, value)
    inputs = cases.scene(plan, 6, device="cpu", coarse=True, invalid=True)
    with pytest.raises(AssertionError):
        cases.check(plan, inputs, device="cpu", route=route)


def test_every_rank_has_its_own_shared_slots():
    """A row's shared slots are its home's, which lie behind the experts there."""
    plan = PLANS["four ranks"]
    inputs = cases.scene(plan, 12, device="cpu", coarse=True, invalid=False)
    inputs["home_T"] = torch.arange(12) % 4
    width = plan.placement.slots_per_rank + 4
    ids_TS = Route(plan)(**inputs).ids_TJ[:, 4:]
    assert torch.equal(ids_TS, (inputs["home_T"][:, None] * width + width - 4 + torch.arange(4)).int())


def test_programs_of_several_rows():
    plan = PLANS["fused zero"]
    cases.check(plan, cases.scene(plan, 6, device="cpu", coarse=True, invalid=True), device="cpu", rows=2)


def test_no_rows_is_no_launch():
    plan = PLANS["v3 fused"]
    routed = Route(plan)(**cases.scene(plan, 0, device="cpu", coarse=True, invalid=False))
    assert routed.ids_TJ.shape == routed.weights_TJ.shape == (0, 9)


def test_loads_are_added_to_what_is_there():
    plan = PLANS["qwen3"]
    inputs = cases.scene(plan, 3, device="cpu", coarse=True, invalid=False)
    load_E = torch.full((128,), 5)
    Route(plan)(**inputs, load_E=load_E)
    assert int(load_E.sum()) == 5 * 128 + 3 * 8


@pytest.mark.parametrize("name", ["replicas", "identity replicas", "fused zero"])
def test_loads_in_copies_add_up_to_the_loads(name):
    """Rows take turns among the copies, so that fewer wait for one counter."""
    plan = PLANS[name]
    inputs = cases.scene(plan, 11, device="cpu", coarse=True, invalid=True)
    sizes = plan.spec.num_experts, plan.placement.num_slots
    one = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    four = [torch.zeros((4, size), dtype=torch.int64) for size in sizes]
    for load_E, load_P in (one, four):
        Route(plan)(**inputs, load_E=load_E, load_P=load_P)
    for single, spread in zip(one, four, strict=True):
        assert torch.equal(spread.sum(0), single)
        assert int((spread.sum(1) > 0).sum()) > 1


@pytest.mark.parametrize(
    ("load_E", "load_P"),
    [
        (torch.zeros(128), None), (torch.zeros(127, dtype=torch.int64), None), (None, torch.zeros(128).long()),
        (torch.zeros((2, 128), dtype=torch.int64), torch.zeros((3, 137), dtype=torch.int64)),
        (torch.zeros((128, 2), dtype=torch.int64).T, None), (torch.zeros((1, 1, 128), dtype=torch.int64), None),
        (torch.zeros((0, 128), dtype=torch.int64), None),
    ],
)  # fmt: skip
def test_loads_of_other_sizes_are_refused(load_E, load_P):
    plan = PLANS["replicas"]
    with pytest.raises(ValueError, match="load_"):
        Route(plan)(**cases.scene(plan, 2, device="cpu", coarse=True, invalid=False), load_E=load_E, load_P=load_P)


@pytest.mark.parametrize("wrong", ["dtype", "width", "bias", "table"])
def test_inputs_the_kernel_would_misread_are_refused(wrong):
    plan = PLANS["v3"]
    inputs = cases.scene(plan, 2, device="cpu", coarse=True, invalid=False)
    if wrong == "dtype":
        inputs["logits_TE"] = inputs["logits_TE"].bfloat16()
    if wrong == "width":
        inputs["logits_TE"] = inputs["logits_TE"][:, :-1].contiguous()
    if wrong == "bias":
        inputs["bias_E"] = None
    if wrong == "table":
        inputs["table_VK"] = torch.zeros(3, 8, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=r"router logits|logits are|bias_E is missing|table_VK is given"):
        Route(plan)(**inputs)
