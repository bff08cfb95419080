"""A layer whose router and experts are the kernels, interpreted: the self-test measures it right and sees a fault."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels run interpreted where triton is installed")

from truegate.law.faults import named
from truegate.law.placement import place
from truegate.law.plan import Choices
from truegate.law.spec import RoutingSpec, Shared
from truegate.moe.backends import choose, compile_layer
from truegate.moe.basis import Instrument
from truegate.moe.layer import MoELayer
from truegate.moe.mutants import LAYERS
from truegate.moe.plant import plant

SIZES = {"num_experts": 4, "top_k": 2, "hidden": 16, "expert_intermediate": 8}


def layer_of(family: str, **choices) -> MoELayer:
    axes = {**SIZES, **LAYERS[family]}
    if axes.get("shared") is not None:
        axes["shared"] = Shared(intermediate=16, gate=axes["shared"].gate)
    if axes.get("groups") is not None:
        axes["groups"] = type(axes["groups"])(count=2, kept=1, score=axes["groups"].score, fill=axes["groups"].fill)
    spec = RoutingSpec(family=family, **axes)
    backends = choose(experts="triton")
    assert backends.router.CONTRACT.name == "triton"
    plan = compile_layer(spec, backends, place(num_experts=4), Choices(**choices))
    return MoELayer(plan, backends, dtype=torch.float32)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "gpt_oss", "llama4"])
def test_measured_coefficients_are_the_definition(family):
    fused = {"fuse_shared": True} if LAYERS[family].get("shared") is not None else {}
    instrument = Instrument(layer_of(family, **fused))
    assert instrument.measure(instrument.rows(1)).error <= 1e-5
    valid_T = torch.tensor([True, False, True, True, False])
    x_TD = torch.where(valid_T[:, None], instrument.rows(5), float("nan"))
    assert instrument.measure(x_TD, valid_T=valid_T).error <= 1e-5


@pytest.mark.parametrize("fault", ["wrong-activation", "gate-up-swapped", "weight-at-input", "shared-inverse-scale"])
def test_a_fault_planted_in_the_kernels_is_measured(fault):
    layer = layer_of("deepseek_v3", fuse_shared=True)
    plant(layer, named(fault))
    instrument = Instrument(layer, amplitude=2.0)
    assert instrument.measure(instrument.rows(3)).error > 1e-2


def test_the_route_kernel_keeps_the_whole_selection_bias():
    """Biases that bf16 makes equal decide the choice."""
    layer = layer_of("deepseek_v3")
    instrument = Instrument(layer).route(bias_alone=True)
    assert instrument.measure(instrument.rows(3)).error <= 1e-5
    layer.selection_bias.copy_(layer.selection_bias.bfloat16())  # as a cast while loading would
    assert instrument.measure(instrument.rows(3)).error > 1e-2
