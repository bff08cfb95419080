"""Router on torch: `law.select` on the rows' own device, then the order law. Computes every routing function.

Invariant: it folds nothing; the plan's factor a is the only scale it multiplies by.
"""

from truegate.law.contract import Router
from truegate.law.order import Tables, realise
from truegate.law.plan import Plan
from truegate.law.select import select

CONTRACT = Router(name="torch", status="runs", source="this repository", id_dtype="int64")


def build(plan: Plan, *, bias_E=None, table_VK=None, tables: Tables | None = None):
    """A callable (logits_TE fp32, gate=, token_ids=, valid=, home=, count=) -> Routed for this layer."""
    import torch

    return TorchRouter(plan, bias_E, table_VK, tables, torch)


class TorchRouter:
    """logits_TE fp32 [T, E+Z] -> Routed: ids_TJ int64 and weights_TJ fp32, as the plan's first edge has them."""

    def __init__(self, plan, bias_E, table_VK, tables, torch):
        self.plan, self.bias_E, self.table_VK, self.tables, self.torch = plan, bias_E, table_VK, tables, torch

    def __call__(self, logits_TE, *, gate=None, token_ids=None, valid=None, home=None, count=False):
        ids_TK, weights_TK = self.select(logits_TE, token_ids)
        return realise(
            self.plan, ids_TK, weights_TK, valid_T=valid, shared_gate_T=gate, home_T=home, tables=self.tables,
            count=count, xp=self.torch,
        )  # fmt: skip

    def select(self, logits_TE, token_ids_T):
        """ids_TK logical and weights_TK before the plan's factor."""
        table_VK = self.table_VK
        token_ids_T = token_ids_T if table_VK is not None else None
        return select(
            self.plan.spec, logits_TE, bias_E=self.bias_E, token_ids_T=token_ids_T, table_VK=table_VK, xp=self.torch,
            scaled=False,
        )  # fmt: skip
