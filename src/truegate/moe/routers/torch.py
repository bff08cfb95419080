"""Router on torch: `law.select` on the rows' own device, then the order law. Computes every routing function.

On a CPU few rows go through `law.select` on numpy, which is the definition itself.

Invariant: it folds nothing; the plan's factor a is the only scale it multiplies by.
"""

import numpy

from truegate.law.contract import Router
from truegate.law.order import Tables, realise
from truegate.law.plan import Plan
from truegate.law.select import select

CONTRACT = Router(name="torch", status="runs", source="this repository", id_dtype="int64")

SMALL = 1024  # logits T * E up to which numpy is the faster on a CPU: 1 row of 16 in 4 groups 35 us against 143


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
        torch, xp = self.torch, self.torch
        arrays = [logits_TE, self.bias_E, None if self.table_VK is None else token_ids_T, self.table_VK]
        if logits_TE.is_cpu and logits_TE.dtype is torch.float32 and logits_TE.numel() <= SMALL:
            arrays, xp = [None if one is None else one.numpy() for one in arrays], numpy
        logits_TE, bias_E, token_ids_T, table_VK = arrays
        chosen = select(
            self.plan.spec, logits_TE, bias_E=bias_E, token_ids_T=token_ids_T, table_VK=table_VK, xp=xp, scaled=False
        )
        return chosen if xp is torch else tuple(map(torch.from_numpy, chosen))
