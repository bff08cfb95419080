"""AMD's aiter routers. Their biased grouped one multiplies its weights by the routed scale: the plan must know.

Our reading of the interface (ROCm only; it has not run here): `biased_grouped_topk` for sigmoid scores with a selection
bias and groups, `topk_softmax` for plain softmax. Ids int32, weights fp32.
"""

from truegate.law.contract import Router
from truegate.law.order import Tables, realise
from truegate.law.plan import Plan

CONTRACT = Router(
    name="aiter",
    status="interface",
    source="engines: folds the scale in its biased grouped router; ids int32",
    id_dtype="int32",
    kinds=frozenset({"biased_grouped_sigmoid", "softmax"}),
    folds=frozenset({"biased_grouped_sigmoid"}),
    goes_with="aiter",
    why_not="needs the aiter package on an AMD GPU (ROCm); use --router torch here",
)


def build(plan: Plan, *, bias_E=None, table_VK=None, tables: Tables | None = None):
    """A callable like routers.torch's, on aiter's kernels; Refused where the package is not installed."""
    from truegate.moe.need import need

    return AiterRouter(plan, bias_E, tables, need("aiter", CONTRACT))


class AiterRouter:
    """logits_TE fp32 -> Routed, the kernel's weights already times the routed scale where `CONTRACT.folds` says so."""

    def __init__(self, plan, bias_E, tables, aiter):
        self.plan, self.bias_E, self.tables, self.aiter = plan, bias_E, tables, aiter

    def __call__(self, logits_TE, *, gate=None, token_ids=None, valid=None, home=None, count=False):
        import torch

        ids_TK, weights_TK = self.select(logits_TE, token_ids)
        return realise(
            self.plan, ids_TK.long(), weights_TK, valid_T=valid, shared_gate_T=gate, home_T=home, tables=self.tables,
            count=count, xp=torch,
        )  # fmt: skip

    def select(self, logits_TE, token_ids_T):
        """ids_TK int32 logical and weights_TK as the kernel leaves them."""
        import torch

        spec = self.plan.spec
        shape = (logits_TE.shape[0], spec.top_k)
        ids_TK = torch.empty(shape, dtype=torch.int32, device=logits_TE.device)
        weights_TK = torch.empty(shape, dtype=torch.float32, device=logits_TE.device)
        renormalise = spec.denominator.value != "none"
        if spec.groups is None:
            scratch_TK = torch.empty_like(ids_TK)
            self.aiter.topk_softmax(weights_TK, ids_TK, scratch_TK, logits_TE, renormalise)
        else:
            self.aiter.biased_grouped_topk(
                logits_TE, self.bias_E, weights_TK, ids_TK, spec.groups.count, spec.groups.kept, renormalise,
                spec.routed_scale,
            )  # fmt: skip
        return ids_TK, weights_TK
