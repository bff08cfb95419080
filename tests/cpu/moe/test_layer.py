"""A whole MoE layer is its definition: y = sum_e C[T,e] F_e(x) + C[T,E] G(x), in float64, whatever the plan chose.

Configs of five families, small; every choice that the definition leaves open: fused or beside, where the scale is,
replicas, kernel. T rows, D hidden, E experts, F expert width.
"""

from types import SimpleNamespace

import pytest
import torch

from truegate.errors import Refused
from truegate.law.families import specs_of
from truegate.law.placement import from_slots, place
from truegate.law.plan import Choices
from truegate.law.select import coefficients
from truegate.law.spec import Activation, SharedGate, WeightAt
from truegate.moe.backends import Backends, choose, compile_layer, load
from truegate.moe.layer import MoELayer
from truegate.moe.recorder import Recorder

D, F, E = 16, 64, 8
COMMON = {"num_hidden_layers": 1, "hidden_size": D, "num_experts_per_tok": 2}
CONFIGS = {
    "deepseek_v3": {
        **COMMON, "model_type": "deepseek_v3", "first_k_dense_replace": 0, "n_routed_experts": E, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": F,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v2": {
        **COMMON, "model_type": "deepseek_v2", "first_k_dense_replace": 0, "n_routed_experts": E, "n_group": 2,
        "topk_group": 1, "topk_method": "group_limited_greedy", "n_shared_experts": 1, "routed_scaling_factor": 16.0,
        "moe_intermediate_size": F, "norm_topk_prob": False,
    },
    "qwen2_moe": {
        **COMMON, "model_type": "qwen2_moe", "num_experts": E, "moe_intermediate_size": F,
        "shared_expert_intermediate_size": 4 * F, "norm_topk_prob": False, "decoder_sparse_step": 1,
    },
    "mixtral": {**COMMON, "model_type": "mixtral", "num_local_experts": E, "intermediate_size": F},
    "llama4_text": {
        **COMMON, "model_type": "llama4_text", "num_local_experts": E, "num_experts_per_tok": 1, "intermediate_size": F,
        "interleave_moe_layer_step": 1,
    },
    "gpt_oss": {**COMMON, "model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": F},
}  # fmt: skip


def parts(kernel):
    if kernel == "torch":
        return choose()
    aiter = load("experts", "aiter")
    twin = SimpleNamespace(CONTRACT=aiter.CONTRACT, build=aiter.build_twin)
    return Backends(router=load("routers", "torch"), experts=twin, dispatch=load("dispatch", "local"))


def layer_of(family, *, kernel="torch", placement=None, dtype=torch.float32, **choices):
    """(layer, weights): the layer loaded through its own load_expert and load_shared."""
    spec = specs_of(CONFIGS[family])[0]
    backends = parts(kernel)
    plan = compile_layer(spec, backends, placement or place(num_experts=E), Choices(**choices))
    layer = MoELayer(plan, backends, dtype=dtype)
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (torch.randn(shape, generator=g) * 0.4).to(dtype)

    w = {e: (draw(F, D), draw(F, D), draw(D, F)) for e in range(E)}
    for e, (gate, up, down) in w.items():
        layer.load_expert(e, gate=gate, up=up, down=down)
    layer.gate_weight.copy_(draw(E, D).float())
    biases = {e: (draw(2 * F), draw(D)) if spec.has_expert_bias else None for e in range(E)}
    for name in ("gate_bias", "selection_bias", "shared_gate"):
        buffer = getattr(layer, name)
        if buffer is not None:
            buffer.copy_(draw(*buffer.shape).to(buffer.dtype))
    if spec.has_expert_bias:
        for slot, e in enumerate(plan.placement.logical_P.tolist()):
            layer.gate_up_bias[slot].copy_(biases[e][0])
            layer.down_bias[slot].copy_(biases[e][1])
    shared = None
    if spec.shared is not None:
        width = spec.shared.intermediate
        shared = (draw(width, D), draw(width, D), draw(D, width))
        layer.load_shared(gate=shared[0], up=shared[1], down=shared[2])
    layer.connect()
    return layer, (w, biases, shared)


def mlp(spec, x, gate, up, down, bias=None):
    h, u = x @ gate.double().T, x @ up.double().T
    if bias is not None:
        b = bias[0].double()
        h, u = h + b[:F], u + b[F:]
    if spec.activation is Activation.SWIGLU_CLAMP:
        h, u = h.clip(max=spec.clamp), u.clip(-spec.clamp, spec.clamp)
        a = (u + 1) * h / (1 + (-1.702 * h).exp())
    else:
        a = h / (1 + (-h).exp()) * u
    y = a @ down.double().T
    return y if bias is None else y + bias[1].double()


def definition(layer, weights, x):
    """The layer's output in float64 from its coefficients alone."""
    spec, (w, biases, shared) = layer.spec, weights
    x = x.double()
    logits = x @ layer.gate_weight.double().T
    if layer.gate_bias is not None:
        logits = logits + layer.gate_bias.double()
    gate = None
    if spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID:
        gate = (x @ layer.shared_gate.double().T).sigmoid()[:, 0].numpy()
    bias = None if layer.selection_bias is None else layer.selection_bias.double().numpy()
    c_out, c_in = (
        torch.tensor(coefficients(spec, logits.numpy(), bias_E=bias, shared_gate_T=gate, at=at))
        for at in (WeightAt.OUTPUT, WeightAt.INPUT)
    )
    y = torch.zeros_like(x)
    for e in range(E):
        out = mlp(spec, x * c_in[:, e : e + 1], *w[e], biases[e])
        y += c_out[:, e : e + 1] * out
    if spec.shared is not None:
        y += c_out[:, E : E + 1] * mlp(spec, x, *shared)
    return y


def batch(num_rows, valid=None, recorder=None):
    valid_T = torch.ones(num_rows, dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
    return SimpleNamespace(valid_T=valid_T, all_valid=bool(valid_T.all()), token_ids_T=None, recorder=recorder)


def rows(num_rows, dtype=torch.float32):
    return torch.randn((num_rows, D), generator=torch.Generator().manual_seed(num_rows)).to(dtype)


PLACEMENTS = {
    "plain": lambda: place(num_experts=E), "replicas": lambda: place(num_experts=E, num_redundant=5),
    "moved": lambda: from_slots([3, 1, 0, 2, 7, 6, 5, 4], num_experts=E, num_ranks=1),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kernel", ["torch", "aiter twin"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_layer_is_its_definition_whatever_the_plan_chose(family, kernel, placement):
    spec = specs_of(CONFIGS[family])[0]
    ran = 0
    for fuse_shared in (False, True):
        for scale_at in ("weights", "output"):
            made = {"kernel": kernel, "placement": PLACEMENTS[placement](), "fuse_shared": fuse_shared}
            try:
                layer, weights = layer_of(family, **made, scale_at=scale_at)
            except Refused:  # what refusals say is tested where they are made
                continue
            ran += 1
            for num_rows in (1, 2, 5, 19):
                x = rows(num_rows)
                got = layer(x, batch(num_rows)).double()
                torch.testing.assert_close(got, definition(layer, weights, x), rtol=1e-4, atol=1e-4)
    can = kernel == "torch" or (spec.weight_at is WeightAt.OUTPUT and not spec.has_expert_bias)
    assert bool(ran) == can
    if can and spec.shared is not None:
        assert ran >= 2


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("scale_at", ["weights", "output"])
def test_bf16_is_within_a_percent_of_the_definition(family, scale_at):
    layer, weights = layer_of(family, dtype=torch.bfloat16, fuse_shared=True, scale_at=scale_at)
    x = rows(33, torch.bfloat16)
    want = definition(layer, weights, x)
    assert (layer(x, batch(33)).double() - want).norm() <= 0.015 * want.norm()


def test_the_recorder_sees_what_the_plan_realised():
    for scale_at in ("weights", "output"):
        for redundant in (0, 5):
            layer, _ = layer_of(
                "deepseek_v3", placement=place(num_experts=E, num_redundant=redundant), scale_at=scale_at,
                fuse_shared=True,
            )  # fmt: skip
            recorder, x = Recorder(), rows(6)
            layer(x, batch(6, recorder=recorder))
            layer(x, batch(6, recorder=recorder))
            ids, weights = recorder.stacked()
            assert ids.shape == weights.shape == (6, 2, 2)
            logits = (x.double() @ layer.gate_weight.double().T).numpy()
            want = coefficients(layer.spec, logits, bias_E=layer.selection_bias.double().numpy())
            got = torch.zeros((6, E), dtype=torch.float64).scatter_(1, ids[:, 0], weights[:, 0].double())
            torch.testing.assert_close(got, torch.tensor(want[:, :E]), rtol=1e-5, atol=1e-6)


def test_replica_tables_of_the_layer_are_live():
    """Moving experts in place moves the ids: the router reads the layer's buffers, not the plan's first placement."""
    layer, _weights = layer_of("mixtral", placement=PLACEMENTS["moved"]())
    x = rows(9)
    want = layer(x, batch(9))
    new = from_slots([7, 6, 5, 4, 3, 2, 1, 0], num_experts=E, num_ranks=1)
    order = [layer.plan.placement.logical_P.tolist().index(e) for e in new.logical_P.tolist()]
    layer.w_gate_up.copy_(layer.w_gate_up[order].clone())
    layer.w_down.copy_(layer.w_down[order].clone())
    layer.replicas_EX.copy_(torch.tensor(new.replicas_EX))
    layer.count_E.copy_(torch.tensor(new.count_E))
    torch.testing.assert_close(layer(x, batch(9)), want, rtol=1e-5, atol=1e-5)


def test_router_logits_are_fp32_whatever_the_run_is_in():
    layer, _ = layer_of("deepseek_v3", dtype=torch.bfloat16)
    assert layer.gate_weight.dtype == layer.selection_bias.dtype == torch.float32
    assert layer.gate(rows(3, torch.bfloat16)).dtype == torch.float32
