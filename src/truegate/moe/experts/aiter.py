"""AMD's aiter fused experts: int32 ids and no negative ones; the id past the last local slot is the sink.

The kernel reads out of bounds on an id below 0 and computes whatever a legal id of weight 0 asks for. `AiterTwin` holds
the same contract on torch, so that it is enforced where no AMD GPU is.
"""

from dataclasses import replace

from truegate.law.contract import Experts, Layout, Sentinel, SharedLayout, ZeroWeight
from truegate.law.plan import Plan

CONTRACT = Experts(
    name="aiter",
    status="interface",
    source="engines: int32, no negatives, sink id = number of local experts; shared slots appended after the gate",
    id_dtype="int32",
    accepts=(ZeroWeight(), Sentinel()),
    weighs="always",
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK}),
    layouts=frozenset({Layout.ROWS}),
    formats=frozenset({"bf16", "fp8_block", "mxfp4"}),
    alignment=64,
    why_not="needs the aiter package on an AMD GPU (ROCm); use --experts torch here",
)


def build(plan: Plan, weights):
    """A callable Sent -> y_TD on aiter's `fused_moe`; Refused where the package is not installed."""
    from truegate.moe.need import need

    return AiterExperts(plan, weights, need("aiter.fused_moe", CONTRACT))


class AiterExperts:
    """Sent (x_TD, ids_TJ int32, weights_TJ fp32) -> y_TD on the AMD kernel."""

    def __init__(self, plan, weights, fused_moe):
        self.weights, self.kernel = weights, fused_moe.fused_moe

    def __call__(self, sent):
        w = self.weights
        return self.kernel(sent.x_TD, w.gate_up_PHD, w.down_PDF, sent.weights_TJ.float(), sent.ids_TJ.int())


def build_twin(plan: Plan, weights):
    """The torch twin: the same arithmetic as experts.torch behind aiter's contract, which it enforces."""
    from truegate.moe.experts import torch as torch_experts

    return AiterTwin(plan.slots_per_rank, torch_experts.build(plan, weights))


class AiterTwin:
    """Raises IndexError on an id outside 0..num_slots, where num_slots is the sink; otherwise experts.torch."""

    def __init__(self, num_slots, kernel):
        self.num_slots, self.kernel = num_slots, kernel

    def __call__(self, sent):
        import torch

        ids_TJ = sent.ids_TJ
        if ids_TJ.numel() and (ids_TJ.min() < 0 or ids_TJ.max() > self.num_slots):
            bad = ids_TJ[(ids_TJ < 0) | (ids_TJ > self.num_slots)].unique().tolist()
            raise IndexError(f"aiter experts got ids {bad}, outside 0..{self.num_slots} (the sink); it would read them")
        sink_TJ = ids_TJ == self.num_slots
        return self.kernel(replace(sent, ids_TJ=torch.where(sink_TJ, -1, ids_TJ)))
