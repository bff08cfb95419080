"""Planting a fault of the catalogue in a running layer, by wrapping its parts; the layer's code has no branch for it.

Invariant: what a wrapper does is the fault's own function of law/faults.py, the one that predicts its coefficients.
"""

import copy
from dataclasses import replace

import torch

from truegate.errors import UserError
from truegate.law.fault import Fault, faulty_select
from truegate.law.faults import FAULTS
from truegate.law.order import realise
from truegate.moe.layer import MoELayer


def plant(layer: MoELayer, fault: Fault) -> None:
    """Make `layer` wrong from now on; UserError where the fault is none for this layer."""
    plan = layer.plan
    if not fault.applies(plan):
        others = ", ".join(one.name for one in FAULTS if one.applies(plan))
        raise UserError(f"{fault.name} is no fault of this layer ({plan.spec.family}); these are: {others}")
    if plan.ranks.ep > 1:
        raise UserError(f"{fault.name}: faults are planted on one rank; this layer is spread over {plan.ranks.ep}")
    layer.router = FaultyRouter(layer.router, fault)
    if fault.gain is not None or fault.weigh_wrong_side:
        layer.experts = _faulty_experts(layer.experts, fault)
    if fault.total is not None or fault.rows is not None or fault.wrap == "overwrite":
        layer.dispatch = FaultyDispatch(layer.dispatch, fault)
    if fault.shared is not None and plan.num_shared == 0:
        right, factor = layer.shared, fault.shared(plan)
        layer.shared = lambda x_TD, gate_T: right(x_TD, gate_T) * factor
    if fault.gate is not None and plan.num_shared == 0:
        shared, gate = layer.shared, fault.gate
        layer.shared = lambda x_TD, gate_T: shared(x_TD, gate(gate_T, torch))


class FaultyRouter:
    """A router with a fault before, in or after its top-k; otherwise routers.torch."""

    def __init__(self, inner, fault: Fault):
        self.inner, self.fault, self.plan = inner, fault, inner.plan
        self._last = None

    def __call__(self, logits_TE, *, gate=None, token_ids=None, valid=None, home=None, count=False):
        fault, plan, inner = self.fault, self.plan, self.inner
        hashed = {} if inner.table_VK is None else {"token_ids_T": token_ids, "table_VK": inner.table_VK}
        ids_TK, weights_TK = faulty_select(fault, plan.spec, logits_TE, inner.bias_E, torch, **hashed)
        if fault.wrap == "pad-last" and valid is not None:
            ids_TK = torch.where(valid[:, None], ids_TK, plan.spec.num_experts - 1)
        mask = None if fault.wrap in ("pad-live", "pad-last") else valid
        if fault.gate is not None and gate is not None and plan.num_shared:
            gate = fault.gate(gate, torch)
        common = {"shared_gate_T": gate, "home_T": home, "tables": inner.tables, "count": count, "xp": torch}
        routed = realise(plan, ids_TK, weights_TK, valid_T=mask, **common)
        if fault.lay is not None:
            routed = fault.lay(plan, routed, torch)
        if fault.shared is not None and plan.num_shared:
            is_shared_TJ = routed.ids_TJ >= plan.placement.slots_per_rank
            weights_TJ = torch.where(is_shared_TJ, routed.weights_TJ * fault.shared(plan), routed.weights_TJ)
            routed = replace(routed, weights_TJ=weights_TJ)
        return self._beside(routed, ids_TK, weights_TK, common)

    def _beside(self, routed, ids_TK, weights_TK, common):
        """Faults in what is kept or reported, not in what is computed from one call."""
        wrap = self.fault.wrap
        if wrap == "count-pads" and routed.load_E is not None:
            unmasked = realise(self.plan, ids_TK, weights_TK, **common)
            return replace(routed, load_E=unmasked.load_E, load_P=unmasked.load_P)
        if wrap == "report-physical":
            return replace(routed, logical_TK=routed.ids_TJ[:, : ids_TK.shape[1]])
        if wrap == "stale":
            last, self._last = self._last, routed.ids_TJ[:1].clone()
            if last is not None and last.shape[1] == routed.ids_TJ.shape[1]:
                return replace(routed, ids_TJ=torch.cat([last, routed.ids_TJ[1:]]))
        return routed


class FaultyDispatch:
    """An exchange whose combine scales or moves the kernel's sum, or which leaves the rows changed behind it."""

    def __init__(self, inner, fault: Fault):
        self.inner, self.fault = inner, fault

    def send(self, x_TD, routed):
        if self.fault.wrap != "overwrite":
            return self.inner.send(x_TD, routed)
        sent = self.inner.send(x_TD.clone(), routed)
        x_TD.mul_(0.5)
        return sent

    def combine(self, y_TD, sent):
        y_TD = self.inner.combine(y_TD, sent)
        if self.fault.total is not None:
            y_TD = y_TD * self.fault.total
        return y_TD if self.fault.rows is None else self.fault.rows(y_TD, torch)


def _faulty_experts(experts, fault: Fault):
    """A copy of the kernel with other arithmetic: another gated activation, or the weight on the other side."""
    wrong = copy.copy(experts)
    if fault.weigh_wrong_side:
        wrong.at_input = not experts.at_input
    if fault.gain is not None:
        wrong.activate = lambda gate, up: fault.gain(experts.activate, gate.clone(), up)
    return wrong
