"""Router in Triton: logits to ids, weights, shared slots, layout and padding in one launch. Every routing function.

Invariant: it folds nothing; the plan's factor a is the only scale it multiplies by.
"""

from truegate.law.contract import Router
from truegate.law.order import Tables
from truegate.law.plan import Plan

CONTRACT = Router(
    name="triton", status="runs", source="this repository", id_dtype="int32", goes_with="triton", max_experts=1024,
    max_groups=32, max_top_k=32,
)  # fmt: skip


def build(plan: Plan, *, bias_E=None, table_VK=None, tables: Tables | None = None):
    """A callable like routers.torch's; Refused where nothing here can run it."""
    from truegate.moe.need import need_triton

    need_triton(CONTRACT)
    return TritonRouter(plan, bias_E, table_VK, tables)


class TritonRouter:
    """logits_TE fp32 [T, E+Z] -> Routed: ids_TJ and weights_TJ as the plan's first edge has them, in one launch."""

    def __init__(self, plan, bias_E, table_VK, tables):
        from truegate.kernels.route import Route

        self.plan, self.bias_E, self.table_VK, self.tables = plan, bias_E, table_VK, tables
        self.route = Route(plan)

    def __call__(self, logits_TE, *, gate=None, token_ids=None, valid=None, home=None, count=False):
        import torch

        placement = self.plan.placement
        sizes = (placement.num_experts, placement.num_slots) if count else ()
        loads = [torch.zeros(size, dtype=torch.int64, device=logits_TE.device) for size in sizes] or (None, None)
        return self.route(
            logits_TE, bias_E=self.bias_E, token_ids_T=None if self.table_VK is None else token_ids,
            table_VK=self.table_VK, shared_gate_T=gate, valid_T=valid, home_T=home, tables=self.tables,
            load_E=loads[0], load_P=loads[1],
        )  # fmt: skip
