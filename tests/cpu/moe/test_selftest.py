"""The self-test measures a right layer as right, sees every fault of the catalogue, and names what it can."""

import numpy as np
import pytest
import torch

from truegate.errors import UserError
from truegate.hub import model_folder
from truegate.law.families import specs_of
from truegate.law.faults import FAULTS, named
from truegate.law.order import realise
from truegate.law.placement import place
from truegate.law.plan import Choices, Ranks
from truegate.law.spec import Denominator, Groups, GroupScore, RoutingSpec, Score, Shared
from truegate.moe.backends import choose, compile_layer
from truegate.moe.basis import CURVED, Instrument, measure
from truegate.moe.layer import MoELayer
from truegate.moe.mutants import LAYERS, SIZES, false_alarms, outcomes, plans
from truegate.moe.plant import plant
from truegate.moe.selftest import self_test

EXACT = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def layer_of(spec: RoutingSpec, *, dtype=torch.float32, **choices) -> MoELayer:
    plan = compile_layer(spec, choose(), place(num_experts=spec.num_experts), Choices(**choices))
    return MoELayer(plan, choose(), dtype=dtype)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("family", LAYERS)
def test_measured_coefficients_are_the_definition(family, dtype):
    spec = RoutingSpec(family=family, **{**SIZES, **LAYERS[family]})
    for fused in (False, True) if spec.shared is not None else (False,):
        assert measure(layer_of(spec, dtype=dtype, fuse_shared=fused), num_rows=40).error <= EXACT[dtype]


@pytest.mark.parametrize("scale_at", ["weights", "output"])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_any_number_of_fused_shared_slots_counts_one(slots, scale_at):
    axes = {**SIZES, **LAYERS["deepseek_v3"], "shared": Shared(intermediate=32 * slots)}
    layer = layer_of(RoutingSpec(family="x", **axes), fuse_shared=True, scale_at=scale_at)
    measured = measure(layer, num_rows=9)
    np.testing.assert_allclose(measured.coefficients[:, 64:], np.ones((9, slots)), rtol=1e-6)


def test_a_layer_with_more_experts_than_channels_is_read_in_windows():
    spec = RoutingSpec(family="x", num_experts=60, top_k=4, score=Score.SOFTMAX, hidden=16, expert_intermediate=24)
    assert measure(layer_of(spec), num_rows=30).error <= 1e-6


def test_tensor_parallel_shards_add_up_to_the_definition():
    spec = RoutingSpec(family="x", **{**SIZES, **LAYERS["deepseek_v2"]})
    shards = [layer_of(spec, fuse_shared=True, ranks=Ranks(tp=2)) for _ in range(2)]
    assert shards[0].w_down.shape[2] == spec.expert_intermediate // 2
    instruments = [Instrument(shard) for shard in shards]

    def kernel(layer, x_TD):
        sent = layer.dispatch.send(x_TD, layer.router(layer.gate(x_TD)))
        return layer.dispatch.combine(layer.experts(sent), sent)

    x_TD = instruments[0].rows(20)
    half = instruments[1].measure(x_TD, run=lambda x, step: kernel(shards[1], x))
    whole = instruments[0].measure(x_TD, run=lambda x, step: kernel(shards[0], x) + kernel(shards[1], x))
    assert whole.error <= 1e-6
    np.testing.assert_allclose(half.coefficients, half.expected / 2, rtol=1e-6)


def test_the_instrument_reads_the_activation_and_not_the_kernel_back():
    layer = layer_of(RoutingSpec(family="x", **{**SIZES, **LAYERS["qwen3_moe"]}))
    plant(layer, named("wrong-activation"))
    instrument = Instrument(layer, amplitude=CURVED)
    measured = instrument.measure(instrument.rows(5))
    ratio = measured.coefficients.max(-1) / measured.expected.max(-1)
    np.testing.assert_allclose(ratio, 1.1094, rtol=1e-3)  # gelu(2) / silu(2)


def test_every_fault_of_the_catalogue_is_caught_and_most_are_named():
    unnamed = []
    for outcome in outcomes(layers_each=1):
        assert outcome.caught_by, f"{outcome.fault.name} in {outcome.layer} was not seen"
        if not outcome.named:
            unnamed.append((outcome.fault.name, outcome.report.fault, outcome.report.sentence))
    assert not unnamed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_fault_of_the_catalogue_is_caught_in_the_embedded_model_or_refused(dtype):
    spec = next(spec for spec in specs_of(model_folder(None)) if spec is not None)
    plan = compile_layer(spec, choose(), place(num_experts=spec.num_experts), Choices(fuse_shared=True))
    right, refused = [], []
    for fault in FAULTS:
        layer = MoELayer(plan, choose(), dtype=dtype)
        try:
            plant(layer, fault)
        except UserError:
            refused.append(fault.name)
            continue
        right += [fault.name] if self_test(layer).ok else []
    assert not right
    assert len(refused) < len(FAULTS) / 4


NO_GROUPS, PAIRS = None, Groups(count=2, kept=1, score=GroupScore.TOP2_SUM, fill=float("-inf"))
SINGLE = Groups(count=3, kept=2, score=GroupScore.MAX, fill=float("-inf"))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups"),
    [(2, 1, NO_GROUPS), (3, 2, NO_GROUPS), (4, 1, PAIRS), (4, 2, PAIRS), (3, 2, SINGLE), (40, 39, NO_GROUPS)],
)
@pytest.mark.parametrize("score", Score)
def test_a_selection_bias_rounded_to_bf16_is_found_whatever_the_sizes(num_experts, top_k, groups, score):
    spec = RoutingSpec(
        family="x", num_experts=num_experts, top_k=top_k, score=score, has_selection_bias=True, groups=groups,
        denominator=Denominator.SUM, hidden=16, expert_intermediate=8,
    )  # fmt: skip
    layer = layer_of(spec)
    assert self_test(layer).ok
    plant(layer, named("bias-bf16"))
    report = self_test(layer)
    assert "bias-bf16" in (report.fault, *report.also)


def test_a_bias_that_cannot_change_the_choice_has_no_faults():
    spec = RoutingSpec(
        family="x", num_experts=4, top_k=4, score=Score.SIGMOID, has_selection_bias=True, hidden=16,
        expert_intermediate=8,
    )  # fmt: skip
    for name in ("bias-bf16", "bias-ignored", "bias-negated"):
        with pytest.raises(UserError, match=f"{name} is no fault of this layer"):
            plant(layer_of(spec), named(name))


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_identity_experts_raise_no_alarm_in_any_dtype(dtype):
    spec = RoutingSpec(
        family="x", num_experts=12, num_identity=4, top_k=6, score=Score.SOFTMAX, hidden=64, expert_intermediate=12,
        denominator=Denominator.SUM, routed_scale=16.0,
    )  # fmt: skip
    for seed in range(4):
        report = self_test(layer_of(spec, dtype=dtype), seed=seed)
        assert report.ok, report.sentence


def test_the_catalogue_is_large_and_its_names_are_stable_and_unique():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 40
    assert all(name == name.lower() and " " not in name and "_" not in name for name in names)
    fixed = {
        "shared-inverse-scale",
        "scale-twice",
        "scale-missing",
        "no-renormalise",
        "bias-leak",
        "group-max",
        "pad-live",
    }
    assert fixed <= set(names)
    applied = {f.name for f in FAULTS if any(f.applies(plan) for plan in plans().values())}
    assert applied == set(names), "a fault that no layer can show is not tested"


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_no_right_layer_raises_an_alarm(dtype):
    for plan, report in false_alarms(40, seed=4, dtype=dtype):
        assert report.ok, f"{report.sentence} in {plan.spec}"


def test_a_fault_reads_its_placement_in_either_array_library():
    """One prediction in numpy and one planted in torch, on the same plan."""
    spec = RoutingSpec(family="x", **{**SIZES, **LAYERS["deepseek_v3"]})
    plan = compile_layer(spec, choose(), place(num_experts=spec.num_experts, num_redundant=4), Choices())
    ids_TK, weights_TK = np.array([[0, 1]]), np.ones((1, 2), dtype=np.float32)
    fault = named("replica-counted-twice")
    right = fault.lay(plan, realise(plan, ids_TK, weights_TK), np)
    planted = fault.lay(plan, realise(plan, *map(torch.from_numpy, (ids_TK, weights_TK)), xp=torch), torch)
    np.testing.assert_array_equal(planted.ids_TJ.numpy(), right.ids_TJ)


def test_the_explanation_of_the_first_report_says_what_happened():
    layer = layer_of(RoutingSpec(family="x", **{**SIZES, **LAYERS["deepseek_v3"]}))
    plant(layer, named("shared-inverse-scale"))
    report = self_test(layer)
    assert report.fault == "shared-inverse-scale"
    assert report.sentence.startswith("shared expert counts 0.400, should be 1.000 = 1/routed_scaling_factor")


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_a_right_layer_passes_in_every_dtype(dtype):
    spec = RoutingSpec(family="x", **{**SIZES, **LAYERS["deepseek_v3"]})
    report = self_test(layer_of(spec, dtype=dtype, fuse_shared=True))
    assert report.ok, report.sentence


def test_a_fault_that_is_none_for_the_layer_is_refused():
    layer = layer_of(RoutingSpec(family="qwen3_moe", **{**SIZES, **LAYERS["qwen3_moe"]}))
    with pytest.raises(UserError, match="shared-inverse-scale is no fault of this layer") as told:
        plant(layer, named("shared-inverse-scale"))
    assert "{" not in str(told.value)
    assert "these are: " in str(told.value)
    others = str(told.value).partition("these are: ")[2].split(", ")
    assert "scale-twice" not in others  # this layer has no routed scale
    for name in others:
        plant(layer_of(layer.spec), named(name))
    with pytest.raises(UserError, match="unknown; there are"):
        named("no-such-fault")
