"""A MoE layer: gate, router, exchange, experts, shared expert, finish; what differs between models is the plan.

Invariant: `forward` is the six lines of its heart; no scale, expert id, rank or backend name appears in it.
T rows, D hidden, E experts, P local slots, F expert width, S fused shared slots, Fs shared width.
"""

import torch
from torch import nn
from torch.nn import functional

from truegate.kernels.matrix import matrix
from truegate.law.order import Tables
from truegate.law.plan import Plan
from truegate.law.spec import RoutingSpec, SharedGate
from truegate.moe.backends import Backends
from truegate.moe.experts.torch import activate
from truegate.moe.sent import ExpertWeights


class MoELayer(nn.Module):
    """y_T = sum_e C[T,e] F_e(x_T) + sum_s C[T,E+s] G_s(x_T), C being what the plan realises.

    Buffers, allocated once and filled by the loader (uninitialised until then): gate_weight [E+Z, D] fp32 (gate_bias
    [E+Z] fp32), selection_bias [E+Z] fp32, w_gate_up [P, 2F, D] and w_down [P, D, F] in `dtype` (P counts fused shared
    slots, after the routed ones), where not fused shared_gate_up [2Fs, D] and shared_down [D, Fs]; shared_gate [1, D].
    """

    def __init__(self, plan: Plan, backends: Backends, *, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__()
        self.plan, self.spec, self.backends = plan, plan.spec, backends
        spec = plan.spec

        def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=device)

        slots, width = plan.slots_per_rank, spec.expert_intermediate // plan.ranks.moe_tp
        tensors = {
            "gate_weight": empty(spec.num_choices, spec.hidden, of=torch.float32),
            "gate_bias": empty(spec.num_choices, of=torch.float32) if spec.has_gate_bias else None,
            "selection_bias": empty(spec.num_choices, of=torch.float32) if spec.has_selection_bias else None,
            "w_gate_up": empty(slots, 2 * width, spec.hidden),
            "w_down": empty(slots, spec.hidden, width),
            "gate_up_bias": empty(slots, 2 * width) if spec.has_expert_bias else None,
            "down_bias": empty(slots, spec.hidden) if spec.has_expert_bias else None,
            "replicas_EX": torch.tensor(plan.placement.replicas_EX, device=device),
            "count_E": torch.tensor(plan.placement.count_E, device=device),
            **_shared_tensors(plan, dtype, device),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.connect()

    def connect(self) -> None:
        """Build router, exchange and experts over the buffers as they now are."""
        plan, backends = self.plan, self.backends
        tables = None if plan.placement.is_identity else Tables(self.replicas_EX, self.count_E)
        weights = ExpertWeights(
            gate_up_PHD=self.w_gate_up, down_PDF=self.w_down, gate_up_bias_PH=self.gate_up_bias,
            down_bias_PD=self.down_bias,
        )  # fmt: skip
        self.experts = backends.experts.build(plan, weights)  # first: the router they bring is no flag that was given
        self.dispatch = backends.dispatch.build(plan)
        assert backends.router is not None, "a kernel that takes logits has no layer yet"
        self.router = backends.router.build(plan, bias_E=self.selection_bias, tables=tables)

    def normed(self, norm, x_TD, residual_TD, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Through the kernels: the layer's output at norm(residual + x), and residual + x.

        Of several rows residual is overwritten with the sum and x with the norm.
        """
        if residual_TD.shape[0] > 1:
            return self(norm.fused(x_TD, residual_TD), batch), residual_TD
        from truegate.kernels.linear import norm_row

        weights = norm.weight, norm.eps
        found = norm_row(x_TD, residual_TD, weights, self.gate_weight, self.gate_bias, keep=True)
        return self(found.h_1K, batch, found.y_1O), found.residual_1K

    def forward(self, x_TD: torch.Tensor, batch, logits_TE: torch.Tensor | None = None) -> torch.Tensor:
        """x_TD in the run's dtype -> y_TD; `batch` gives valid_T, all_valid, token_ids_T and recorder.

        logits_TE are the router's, where they have been computed.
        """
        valid = None if batch.all_valid else batch.valid_T
        g = self.gate_of_shared(x_TD)
        logits = self.gate(x_TD) if logits_TE is None else logits_TE
        routed = self.router(logits, gate=g, token_ids=batch.token_ids_T, valid=valid)
        sent = self.dispatch.send(x_TD, routed)
        shared = self.shared(x_TD, g)
        y = self.dispatch.combine(self.experts(sent), sent)
        if batch.recorder is not None:
            batch.recorder.add(self.plan, routed)
        return self.plan.finish(y, shared)

    def values(self, num_rows: int) -> int:
        """Numbers that a step holds here at a time beside what goes in and out."""
        hidden, width = self.w_down.shape[1:]
        beside = 0 if self.shared_gate_up is None else self.shared_gate_up.shape[0] * 3 // 2 + hidden
        num, item = num_rows * self.plan.slots_per_row, self.w_down.itemsize
        logits = num_rows * self.spec.num_choices * 4 // item
        return self.backends.experts.values(num, hidden, width, item) + num_rows * beside + logits

    def turns(self) -> list[int]:
        """Row counts above which a step's kernels have another form."""
        turns = self.backends.experts.turns(self.plan, self.w_down)
        if self.gate_weight.is_cuda:
            from truegate.kernels.gate import turns as turns_of_gate

            turns = [*turns, *turns_of_gate(*self.gate_weight.shape)]
        return turns

    def gate(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Router logits [T, E+Z] in fp32, whatever the run's dtype: fewer bits reorder experts."""
        if x_TD.is_cuda:
            from truegate.kernels.gate import gate

            return gate(x_TD, self.gate_weight, self.gate_bias)
        return functional.linear(x_TD.float(), self.gate_weight, self.gate_bias)

    def gate_of_shared(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """g_T = sigmoid(x . w), fp32 [T]; None where the shared expert's gate is one, or there is none."""
        if self.shared_gate is None:
            return None
        return functional.linear(x_TD, self.shared_gate).float().sigmoid()[:, 0]

    def shared(self, x_TD: torch.Tensor, gate_T: torch.Tensor | None) -> torch.Tensor | None:
        """The shared expert's output g_T * G(x_T), or None where it is fused or absent."""
        if self.shared_gate_up is None:
            return None
        gate, up = functional.linear(x_TD, self.shared_gate_up).chunk(2, -1)
        y_TD = functional.linear(activate(self.spec, gate, up), self.shared_down)
        return y_TD if gate_T is None else y_TD * gate_T.to(y_TD.dtype)[:, None]

    def expert_slots(self, expert: int) -> list[int]:
        """Local slots that hold logical expert `expert` (several where it has replicas)."""
        placement = self.plan.placement
        return placement.replicas_EX[expert, : placement.count_E[expert]].tolist()

    @torch.no_grad()
    def load_expert(self, expert: int, *, gate=None, up=None, down=None) -> None:
        """Copy one routed expert's projections, [F, D], [F, D], [D, F] in any float dtype, into every slot of it."""
        for slot in self.expert_slots(expert):
            self._store(slot, gate, up, down)

    @torch.no_grad()
    def load_shared(self, *, gate=None, up=None, down=None) -> None:
        """Copy the shared expert's projections, [Fs, D], [Fs, D], [D, Fs], or cut them into its fused slots."""
        if self.plan.num_shared == 0:
            width = self.shared_down.shape[1]
            for rows, tensor in ((slice(0, width), gate), (slice(width, None), up)):
                if tensor is not None:
                    self.shared_gate_up[rows].copy_(tensor)
            if down is not None:
                self.shared_down.copy_(down)
            return
        width = self.w_down.shape[2]
        for j in range(self.plan.num_shared):
            part = slice(j * width, (j + 1) * width)
            self.load_shared_slot(
                j,
                gate=None if gate is None else gate[part],
                up=None if up is None else up[part],
                down=None if down is None else down[:, part],
            )

    @torch.no_grad()
    def load_shared_slot(self, j: int, *, gate=None, up=None, down=None) -> None:
        """Copy the projections of fused shared slot j, [F, D], [F, D], [D, F]."""
        self._store(self.plan.placement.slots_per_rank + j, gate, up, down)

    def _store(self, slot: int, gate, up, down) -> None:
        width = self.w_down.shape[2]
        if gate is not None:
            self.w_gate_up[slot, :width].copy_(gate)
        if up is not None:
            self.w_gate_up[slot, width:].copy_(up)
        if down is not None:
            self.w_down[slot].copy_(down)


def _shared_tensors(plan: Plan, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor | None]:
    """Buffers of an unfused shared expert and of its gate; None where the plan has none."""
    spec: RoutingSpec = plan.spec
    beside = spec.shared is not None and plan.num_shared == 0
    gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
    width = spec.shared.intermediate // plan.ranks.tp if spec.shared is not None else 0
    place = {"dtype": dtype, "device": device}
    return {
        "shared_gate_up": matrix(2 * width, spec.hidden, **place) if beside else None,
        "shared_down": matrix(spec.hidden, width, **place) if beside else None,
        "shared_gate": matrix(1, spec.hidden, **place) if gated else None,
    }
