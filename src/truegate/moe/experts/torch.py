"""Experts on torch: rows sorted by slot, one grouped matmul each way; few assignments go one by one.

Invariant: a slot marked Drop(-1), or of an id that no row has, is never read; valid rows do not depend on other rows.
T rows, J slots a row, P local slots, D hidden, F expert width, H = 2F (gate then up), N = T * J assignments.
"""

import numpy

from truegate.law.contract import Drop, Experts, Layout, Sentinel, SharedLayout, ZeroWeight
from truegate.law.plan import Plan
from truegate.law.spec import Activation, WeightAt
from truegate.moe.sent import ExpertWeights, Sent

CONTRACT = Experts(
    name="torch",
    status="runs",
    source="this repository",
    id_dtype="int64",
    accepts=(Drop(), ZeroWeight(), Sentinel()),
    weight_at=frozenset({WeightAt.OUTPUT, WeightAt.INPUT}),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK}),
    layouts=frozenset({Layout.ROWS}),
    activations=frozenset(Activation),
    expert_bias=True,
    formats=frozenset({"bf16", "fp16", "fp32"}),
    graph_safe=False,  # group sizes come to the host
)

SMALL = 8  # assignments N up to which one by one they beat sort and group on a CPU


def build(plan: Plan, weights: ExpertWeights) -> "TorchExperts":
    """A callable Sent -> y_TD in x's dtype."""
    return TorchExperts(plan, weights)


def activate(spec, gate, up):
    """The gated activation of `spec.activation`, elementwise: gate and up [..., F] -> [..., F]."""
    from torch.nn import functional

    match spec.activation:
        case Activation.SILU:
            return functional.silu(gate).mul_(up)
        case Activation.GELU:
            return functional.gelu(gate) * up
        case Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh") * up
        case Activation.SWIGLU_CLAMP:
            gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
            return (up + 1) * gate * (gate * 1.702).sigmoid()


def values(num: int, hidden: int, width: int, element_size: int) -> int:
    """Numbers that a call of so many assignments holds at a time on a GPU.

    x and out by expert, and beside them gate, up and h, or out once more in the order of the rows.
    """
    return num * (2 * hidden + max(hidden, 3 * width))


def turns(plan: Plan, down_PDF) -> list[int]:
    """Row counts above which a step's kernels have another form: none."""
    return []


class TorchExperts:
    """y[t] = sum_j weights[t, j] * F_{ids[t, j]}(x[t]), or F(weights[t, j] * x[t]) where the spec weighs the input."""

    def __init__(self, plan: Plan, weights: ExpertWeights):
        self.spec, self.weights = plan.spec, weights
        self.gate_up_P, self.down_P = weights.gate_up_PHD.unbind(), weights.down_PDF.unbind()
        self.num_slots = plan.slots_per_rank
        self.at_input = plan.spec.weight_at is WeightAt.INPUT
        has_bias = weights.gate_up_bias_PH is not None
        self.grouped = None if has_bias else _grouped(weights)

    def activate(self, gate, up):
        """The spec's gated activation, [..., F]."""
        return activate(self.spec, gate, up)

    def __call__(self, sent: Sent):
        num_rows, width = sent.ids_TJ.shape
        if sent.ids_TJ.is_cuda and self.grouped is not None:
            return self._sorted_on_device(sent)
        if num_rows * width <= SMALL and not sent.ids_TJ.is_cuda:
            return self._one_by_one(sent)
        return self._sorted(sent)

    def _expert(self, slot: int, x_ND):
        from torch.nn import functional

        w = self.weights
        bias = w.gate_up_bias_PH
        h = functional.linear(x_ND, w.gate_up_PHD[slot], None if bias is None else bias[slot])
        gate, up = h.chunk(2, -1)
        bias = w.down_bias_PD
        return functional.linear(self.activate(gate, up), w.down_PDF[slot], None if bias is None else bias[slot])

    def _one_by_one(self, sent):
        """Few assignments: a sort and two gathers cost more than the experts."""
        import torch

        w, num_choices = self.weights, sent.ids_TJ.shape[1]
        slots = sent.ids_TJ.flatten().tolist()  # sync: a CPU tensor
        y_TD = torch.zeros_like(sent.x_TD)
        live = [n for n, slot in enumerate(slots) if 0 <= slot < self.num_slots]
        if not live:
            return y_TD
        every = len(live) == len(slots)
        slots = slots if every else [slots[n] for n in live]
        rows = [n // num_choices for n in live]
        weights_N1 = sent.weights_TJ.flatten()[slice(None) if every else live, None].to(sent.x_TD.dtype)
        rows_T = sent.x_TD.unbind()
        x_ND = (sent.x_TD[rows] * weights_N1).unbind() if self.at_input else [rows_T[t] for t in rows]
        h_NH = torch.stack([torch.mv(self.gate_up_P[slot], x_D) for slot, x_D in zip(slots, x_ND, strict=True)])
        if w.gate_up_bias_PH is not None:
            h_NH += w.gate_up_bias_PH[slots]
        hidden_NF = self.activate(*h_NH.chunk(2, -1))
        if not self.at_input:
            hidden_NF = hidden_NF * weights_N1
        sums_T = y_TD.unbind()
        for slot, t, hidden_F in zip(slots, rows, hidden_NF.unbind(), strict=True):
            sums_T[t].addmv_(self.down_P[slot], hidden_F)
        if w.down_bias_PD is not None:
            bias_ND = w.down_bias_PD[slots]
            y_TD.index_add_(
                0, torch.tensor(rows, device=y_TD.device), bias_ND if self.at_input else bias_ND * weights_N1
            )
        return y_TD

    def _sorted(self, sent):
        """Sort assignments by slot (invalid ones last), run each slot's rows together, add weighted rows back."""
        import torch

        num_slots, device = self.num_slots, sent.x_TD.device
        ids_N = sent.ids_TJ.flatten().cpu().numpy()  # sync: on a CPU, or for weights that only the loop takes
        legal_N = numpy.where((ids_N < 0) | (ids_N > num_slots), num_slots, ids_N)
        counts_P = numpy.bincount(legal_N, minlength=num_slots + 1)[:num_slots]
        order_N = torch.from_numpy(legal_N.argsort(kind="stable")[: counts_P.sum()]).to(device)
        rows_N = order_N // sent.ids_TJ.shape[1]
        x_ND = sent.x_TD[rows_N]
        weights_N1 = sent.weights_TJ.flatten()[order_N].to(x_ND.dtype)[:, None]
        if self.at_input:
            x_ND = x_ND * weights_N1
        if self.grouped is None or len(x_ND) == 0:
            parts = [self._expert(slot, part) for slot, part in _parts(x_ND, counts_P.tolist())]
            out_ND = torch.cat(parts) if parts else x_ND
        else:
            ends_P = torch.from_numpy(counts_P.cumsum().astype(numpy.int32))
            out_ND = self._both(x_ND, ends_P)
        if not self.at_input:
            out_ND = out_ND * weights_N1
        return torch.zeros_like(sent.x_TD).index_add_(0, rows_N, out_ND)

    def _sorted_on_device(self, sent):
        """The same where the host must not look: all N rows stay, those of no slot are put to zero."""
        import torch

        ids_N = sent.ids_TJ.flatten()
        slots_N, order_N = torch.where(ids_N < 0, self.num_slots, ids_N).sort(stable=True)
        rows_N = order_N // sent.ids_TJ.shape[1]
        ends_P = torch.searchsorted(slots_N, torch.arange(self.num_slots, device=slots_N.device), right=True)
        x_ND = sent.x_TD[rows_N]
        weights_N1 = sent.weights_TJ.reshape(-1)[order_N].to(x_ND.dtype)[:, None]
        if self.at_input:
            x_ND = x_ND * weights_N1
        out_ND = self._both(x_ND, ends_P.to(torch.int32))
        if not self.at_input:
            out_ND = out_ND * weights_N1
        out_ND = torch.where((slots_N < self.num_slots)[:, None], out_ND, 0)  # rows past the last end hold anything
        y_ND = torch.empty_like(out_ND)
        y_ND[order_N] = out_ND
        return y_ND.view(*sent.ids_TJ.shape, -1).sum(1, dtype=torch.float32).to(x_ND.dtype)

    def _both(self, x_ND, ends_P):
        gate, up = self.grouped(x_ND, self.weights.gate_up_PHD.transpose(1, 2), offs=ends_P).chunk(2, -1)
        return self.grouped(self.activate(gate, up), self.weights.down_PDF.transpose(1, 2), offs=ends_P)


def _parts(x_ND, sizes):
    start = 0
    for slot, size in enumerate(sizes):
        if size:
            yield slot, x_ND[start : start + size]
            start += size


def _grouped(weights: ExpertWeights):
    """torch's grouped matmul where it exists and takes these weights (rows of 16 bytes; on a GPU, bf16 on Hopper and
    later); else None: expert by expert."""
    from torch.nn import functional

    grouped = getattr(functional, "grouped_mm", None)
    w = weights.gate_up_PHD
    per_16_bytes = 16 // w.element_size()
    sizes = (w.shape[2], w.shape[1], weights.down_PDF.shape[2])
    if grouped is None or any(size % per_16_bytes for size in sizes):
        return None
    if w.is_cuda:
        import torch

        return grouped if w.dtype == torch.bfloat16 and torch.cuda.get_device_capability(w.device) >= (9, 0) else None
    return grouped
