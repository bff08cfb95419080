"""The route kernel, interpreted, is its twin: every routing function and every rule of the order law."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels run interpreted where triton is installed")

import route_cases as cases

from truegate.kernels.route import Route

PLANS = cases.plans()
PADDED = ("v3 fused", "hash", *(name for name in PLANS if name.startswith(("fused", "identity", "replicas"))))


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
