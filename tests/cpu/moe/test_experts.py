"""Experts on torch compute y[t] = sum_j w[t, j] F_{ids[t, j]}(x[t]) and read nothing that no valid row names."""

from types import SimpleNamespace

import pytest
import torch

from truegate.law.contract import Drop
from truegate.law.spec import Activation, WeightAt
from truegate.moe.backends import load
from truegate.moe.sent import ExpertWeights, Sent

P, D, F = 6, 8, 12


def silu(x):
    return x / (1 + (-x).exp())


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def definition(activation, gate, up, clamp):
    """The gated activations, written from their formulas."""
    if activation is Activation.SWIGLU_CLAMP:
        gate, up = gate.clip(max=clamp), up.clip(-clamp, clamp)
        return (up + 1) * gate / (1 + (-1.702 * gate).exp())
    return {Activation.SILU: silu, Activation.GELU: gelu, Activation.GELU_TANH: gelu_tanh}[activation](gate) * up


def naive(w, activation, at_input, sent, clamp):
    """Row by row and slot by slot in float64."""
    y = torch.zeros(sent.x_TD.shape, dtype=torch.float64)
    wide = {k: None if v is None else v.double() for k, v in vars(w).items()}
    for t, j in ((t, j) for t in range(len(y)) for j in range(sent.ids_TJ.shape[1])):
        slot, weight = int(sent.ids_TJ[t, j]), float(sent.weights_TJ[t, j])
        if not 0 <= slot < P:
            continue
        x = sent.x_TD[t].double() * (weight if at_input else 1.0)
        h = wide["gate_up_PHD"][slot] @ x
        if wide["gate_up_bias_PH"] is not None:
            h = h + wide["gate_up_bias_PH"][slot]
        out = wide["down_PDF"][slot] @ definition(activation, h[: len(h) // 2], h[len(h) // 2 :], clamp)
        if wide["down_bias_PD"] is not None:
            out = out + wide["down_bias_PD"][slot]
        y[t] += out * (1.0 if at_input else weight)
    return y


def build(activation=Activation.SILU, at_input=False, bias=False, dtype=torch.float32, width=F):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)  # noqa: E731
    weights = ExpertWeights(
        gate_up_PHD=draw(P, 2 * width, D), down_PDF=draw(P, D, width),
        gate_up_bias_PH=draw(P, 2 * width) if bias else None, down_bias_PD=draw(P, D) if bias else None,
    )  # fmt: skip
    clamp = 0.7 if activation is Activation.SWIGLU_CLAMP else None
    spec = SimpleNamespace(
        activation=activation, clamp=clamp, weight_at=WeightAt.INPUT if at_input else WeightAt.OUTPUT
    )
    plan = SimpleNamespace(spec=spec, slots_per_rank=P, receive=SimpleNamespace(pad=Drop()))
    return load("experts", "torch").build(plan, weights), weights, clamp


def scene(num_rows, width, seed=1, dtype=torch.float32, drop=0.25):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(P, generator=g)[:width] for _ in range(num_rows)]).reshape(num_rows, width)
    ids[torch.rand(ids.shape, generator=g) < drop] = -1
    return Sent(torch.randn((num_rows, D), generator=g).to(dtype), ids, torch.rand(ids.shape, generator=g))


# rows and slots a row: up to 8 assignments go one by one, the others are sorted; F = 10 has rows that are no multiple
# of 16 bytes and goes expert by expert
SHAPES = [(0, 3), (1, 1), (1, 4), (2, 2), (3, 2), (2, 4), (3, 3), (17, 3), (64, 6)]


@pytest.mark.parametrize("activation", Activation, ids=str)
@pytest.mark.parametrize("at_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("width", [12, 10])
def test_experts_are_their_definition_at_every_row_count(activation, at_input, bias, width):
    kernel, weights, clamp = build(activation, at_input, bias, width=width)
    for num_rows, slots in SHAPES:
        sent = scene(num_rows, slots) if num_rows else scene(1, slots)
        if num_rows == 0:
            sent = Sent(sent.x_TD[:0], sent.ids_TJ[:0], sent.weights_TJ[:0])
        want = naive(weights, activation, at_input, sent, clamp)
        torch.testing.assert_close(kernel(sent).double(), want, rtol=2e-5, atol=2e-5)


def test_bf16_is_within_a_percent_of_the_definition():
    kernel, weights, clamp = build(dtype=torch.bfloat16)
    for num_rows, slots in SHAPES[1:]:
        sent = scene(num_rows, slots, dtype=torch.bfloat16)
        want = naive(weights, Activation.SILU, False, sent, clamp)
        got = kernel(sent)
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize(("num_rows", "slots"), [(1, 4), (9, 3)])
def test_experts_that_no_row_names_are_never_read(num_rows, slots):
    kernel, weights, _ = build()
    sent = scene(num_rows, slots)
    sent.ids_TJ[sent.ids_TJ >= 4] = -1
    want = kernel(sent)
    weights.gate_up_PHD[4:] = float("nan")
    weights.down_PDF[4:] = float("nan")
    assert torch.equal(kernel(sent), want)


@pytest.mark.parametrize(("num_rows", "slots"), [(1, 4), (2, 2), (9, 3), (40, 4)])
def test_dropped_slots_hold_anything(num_rows, slots):
    kernel, _, _ = build()
    sent = scene(num_rows, slots)
    want = kernel(sent)
    dropped = sent.ids_TJ < 0
    poisoned = Sent(sent.x_TD, sent.ids_TJ, torch.where(dropped, float("nan"), sent.weights_TJ))
    assert torch.equal(kernel(poisoned), want)
    rows = dropped.all(1)
    x = torch.where(rows[:, None], float("nan"), sent.x_TD)
    assert torch.equal(kernel(Sent(x, sent.ids_TJ, poisoned.weights_TJ)), want)
    assert (want[rows] == 0).all()


@pytest.mark.parametrize(("num_rows", "slots"), [(1, 3), (9, 3)])
def test_the_sink_is_skipped_as_a_drop_is(num_rows, slots):
    kernel, _, _ = build()
    sent = scene(num_rows, slots)
    sink = Sent(sent.x_TD, torch.where(sent.ids_TJ < 0, P, sent.ids_TJ), sent.weights_TJ)
    assert torch.equal(kernel(sink), kernel(sent))


def test_rows_do_not_depend_on_what_other_rows_hold():
    kernel, _, _ = build()
    sent = scene(12, 3)
    want = kernel(sent)
    x = sent.x_TD.clone()
    x[::2] = float("nan")
    assert torch.equal(kernel(Sent(x, sent.ids_TJ, sent.weights_TJ))[1::2], want[1::2])
