"""Experts on torch: rows sorted by slot, one grouped matmul each way; small batches go row by row.

Invariant: a slot marked Drop(-1), or of an id that no row has, is never read; valid rows do not depend on other rows.
T rows, J slots a row, P local slots, D hidden, F expert width, H = 2F (gate then up), N = T * J assignments.
"""

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

SMALL = 4  # assignments N up to which single rows beat sort and group on a CPU


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


class TorchExperts:
    """y[t] = sum_j weights[t, j] * F_{ids[t, j]}(x[t]), or F(weights[t, j] * x[t]) where the spec weighs the input."""

    def __init__(self, plan: Plan, weights: ExpertWeights):
        self.spec, self.weights = plan.spec, weights
        self.num_slots = plan.slots_per_rank
        self.pad = plan.receive.pad
        self.at_input = plan.spec.weight_at is WeightAt.INPUT
        has_bias = weights.gate_up_bias_PH is not None
        self.grouped = None if has_bias else _grouped(weights)

    def activate(self, gate, up):
        """The spec's gated activation, [..., F]."""
        return activate(self.spec, gate, up)

    def __call__(self, sent: Sent):
        num_rows, width = sent.ids_TJ.shape
        if num_rows * width <= SMALL and not sent.ids_TJ.is_cuda:
            return self._row_by_row(sent)
        return self._sorted(sent)

    def _expert(self, slot: int, x_ND):
        from torch.nn import functional

        w = self.weights
        bias = w.gate_up_bias_PH
        h = functional.linear(x_ND, w.gate_up_PHD[slot], None if bias is None else bias[slot])
        gate, up = h.chunk(2, -1)
        bias = w.down_bias_PD
        return functional.linear(self.activate(gate, up), w.down_PDF[slot], None if bias is None else bias[slot])

    def _row_by_row(self, sent):
        """At one or two tokens, a sort and two gathers cost more than the experts."""
        import torch

        y_TD = torch.zeros_like(sent.x_TD)
        weights_TJ = sent.weights_TJ.to(sent.x_TD.dtype)
        for t, ids in enumerate(sent.ids_TJ.tolist()):  # sync: a CPU tensor
            x_1D = sent.x_TD[t : t + 1]
            for j, slot in enumerate(ids):
                if not 0 <= slot < self.num_slots:
                    continue
                if self.at_input:
                    y_TD[t] += self._expert(slot, x_1D * weights_TJ[t, j])[0]
                else:
                    y_TD[t : t + 1].addcmul_(self._expert(slot, x_1D), weights_TJ[t, j])
        return y_TD

    def _sorted(self, sent):
        """Sort assignments by slot (invalid ones last), run each slot's rows together, add weighted rows back."""
        import torch

        width = sent.ids_TJ.shape[1]
        ids_N = sent.ids_TJ.reshape(-1)
        legal_N = torch.where((ids_N < 0) | (ids_N > self.num_slots), self.num_slots, ids_N)
        order_N = legal_N.argsort(stable=True)
        if self.grouped is not None and ids_N.is_cuda:
            return self._sorted_on_device(sent, legal_N, order_N)
        counts_P = torch.bincount(legal_N, minlength=self.num_slots + 1)[: self.num_slots]
        sizes = counts_P.tolist()  # sync: a CPU tensor, or weights that only the loop below takes
        order_N = order_N[: sum(sizes)]
        rows_N = order_N // width
        x_ND = sent.x_TD[rows_N]
        weights_N1 = sent.weights_TJ.reshape(-1)[order_N].to(x_ND.dtype)[:, None]
        if self.at_input:
            x_ND = x_ND * weights_N1
        if self.grouped is None or len(x_ND) == 0:
            parts = [self._expert(slot, part) for slot, part in _parts(x_ND, sizes)]
            out_ND = torch.cat(parts) if parts else x_ND
        else:
            ends_P = counts_P.cumsum(0).to(torch.int32)
            out_ND = self._both(x_ND, ends_P)
        if not self.at_input:
            out_ND = out_ND * weights_N1
        return torch.zeros_like(sent.x_TD).index_add_(0, rows_N, out_ND)

    def _sorted_on_device(self, sent, legal_N, order_N):
        """The same where the host must not look: all N rows stay, those of no slot are put to zero."""
        import torch

        rows_N, slots_N = order_N // sent.ids_TJ.shape[1], legal_N[order_N]
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
