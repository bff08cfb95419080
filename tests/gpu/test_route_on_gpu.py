"""The route kernel on a GPU (NVIDIA, sm_80 or newer; written for H200) is its twin there, at every row count."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import broken_route_cases as broken
import route_cases as cases

from truegate.kernels.route import Route
from truegate.law.select import select
from truegate.law.spec import SelectOn
from truegate.moe.selftest import self_test

pytestmark = pytest.mark.gpu

PLANS = cases.plans()
NOISE = 2e-6


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("invalid", [False, True], ids=["", "padded"])
def test_route_is_its_twin_where_choices_tie_or_differ(name, invalid):
    for num_rows, rows in ((1, 1), (5, 1), (64, 2), (333, 1), (1025, 1)):
        inputs = cases.scene(PLANS[name], num_rows, device="cuda", coarse=True, invalid=invalid, seed=num_rows)
        cases.check(PLANS[name], inputs, device="cuda", rows=rows)


@pytest.mark.parametrize("name", ["fused zero", "replicas per rank", "identity replicas"])
def test_rows_counted_in_copies_add_up(name):
    plan, num_rows = PLANS[name], 4096
    inputs = cases.scene(plan, num_rows, device="cuda", coarse=True, invalid=True)
    want = cases.twin(plan, inputs["logits_TE"], **{k: v for k, v in inputs.items() if k != "logits_TE"}, count=True)
    sizes = plan.spec.num_experts, plan.placement.num_slots
    load_E, load_P = (torch.full((16, size), 3, device="cuda") for size in sizes)
    Route(plan)(**inputs, load_E=load_E, load_P=load_P)
    assert torch.equal(load_E.sum(0) - 48, want.load_E)
    assert torch.equal(load_P.sum(0) - 48, want.load_P)


def decided(plan, inputs) -> torch.Tensor:
    """Rows whose choice is the same in float64 whatever a little noise does to the logits."""
    spec = plan.spec
    logits = inputs["logits_TE"].double().cpu().numpy()
    bias = None if inputs["bias_E"] is None else inputs["bias_E"].double().cpu().numpy()
    rng, stable = np.random.default_rng(0), np.ones(len(logits), dtype=bool)
    chosen = select(spec, logits, bias_E=bias).ids_TK
    for _ in range(3):
        noisy = logits + NOISE * (1 + np.abs(logits)) * rng.choice([-1.0, 1.0], logits.shape)
        stable &= (select(spec, noisy, bias_E=bias).ids_TK == chosen).all(-1)
    return torch.from_numpy(stable).cuda()


@pytest.mark.parametrize("name", [n for n, plan in PLANS.items() if plan.spec.select_on is not SelectOn.HASH])
def test_route_is_its_twin_on_random_logits(name):
    plan = PLANS[name]
    inputs = cases.scene(plan, 1025, device="cuda", coarse=False, invalid=False)
    inputs["logits_TE"][1:5] = torch.randn_like(inputs["logits_TE"][1:5])  # NaN rows are the other test's
    rows = decided(plan, inputs)
    assert rows.float().mean() > 0.9
    cases.check(plan, inputs, device="cuda", decided_T=rows)


def test_a_captured_graph_routes_new_logits():
    plan = PLANS["v3 fused"]
    first, second = (cases.scene(plan, 33, device="cuda", coarse=True, invalid=True, seed=s) for s in (1, 2))
    kernel, live = Route(plan), {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.items()}
    kernel(**live)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = kernel(**live)
    for scene in (second, first):
        for key, value in scene.items():
            if isinstance(value, torch.Tensor):
                live[key].copy_(value)
        graph.replay()
        want = kernel(**scene)
        assert torch.equal(routed.ids_TJ, want.ids_TJ)
        assert torch.equal(routed.weights_TJ.nan_to_num(7), want.weights_TJ.nan_to_num(7))


@pytest.mark.parametrize("name", broken.SPECS)
def test_the_self_test_passes_on_the_kernel_whole(name):
    report = self_test(broken.layer_of(name, device="cuda"))
    assert report.ok, report.sentence


@pytest.mark.parametrize(("name", "constant", "value"), broken.CONSTANTS)
def test_the_self_test_sees_a_broken_constant(name, constant, value):
    layer = broken.layer_of(name, device="cuda")
    broken.break_constant(layer.router.route, constant, value)
    wrong = [check for check in self_test(layer).checks if not check.ok]
    assert any(check.what == "coefficients" for check in wrong), f"only {[check.name for check in wrong]}"


@pytest.mark.parametrize(("name", "what", "change"), broken.INPUTS)
def test_the_self_test_sees_wrong_inputs(name, what, change):
    layer = broken.layer_of(name, device="cuda")
    broken.mislead(layer, change)
    wrong = [check for check in self_test(layer).checks if not check.ok]
    expected = "padding" if what == "no valid" else "coefficients"
    assert any(check.what == expected for check in wrong), f"only {[check.name for check in wrong]}"
