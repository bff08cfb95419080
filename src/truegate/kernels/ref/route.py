"""Twin of kernels/route.py: `law.select` and the order law on torch, on the logits' device."""

import torch

from truegate.law.order import Routed, Tables, realise
from truegate.law.plan import Plan
from truegate.law.select import select


def route(
    plan: Plan,
    logits_TE: torch.Tensor,
    *,
    bias_E: torch.Tensor | None = None,
    token_ids_T: torch.Tensor | None = None,
    table_VK: torch.Tensor | None = None,
    shared_gate_T: torch.Tensor | None = None,
    valid_T: torch.Tensor | None = None,
    home_T: torch.Tensor | None = None,
    tables: Tables | None = None,
    count: bool = False,
) -> Routed:
    """logits_TE fp32 -> Routed: what the kernel must give."""
    ids_TK, weights_TK = select(
        plan.spec, logits_TE, bias_E=bias_E, token_ids_T=token_ids_T, table_VK=table_VK, xp=torch, scaled=False
    )
    return realise(
        plan, ids_TK, weights_TK, valid_T=valid_T, shared_gate_T=shared_gate_T, home_T=home_T, tables=tables,
        count=count, xp=torch,
    )  # fmt: skip
