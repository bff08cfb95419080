"""Which experts ran: what every MoE layer chose in a step, as the router chose it.

Invariant: it records the logical ids and, where asked, the final weights that the plan realises, never a second
computation of them. T rows of the step, L MoE layers, K routed top-k.
"""

import torch

from truegate.law.order import Routed
from truegate.law.plan import Plan


class Recorder:
    """Collects (ids_TK, weights_TK) of each MoE layer of one step, in the order the layers run.

    weights False: the ids alone, which is all that counting an expert's rows takes.
    """

    def __init__(self, *, weights: bool = True) -> None:
        self._with_weights = weights
        self._ids: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def add(self, plan: Plan, routed: Routed) -> None:
        """Take one layer's choice; the weights are coefficients of the sum: times p * a already, times b here."""
        later = plan.scales.factors.later
        self._ids.append(routed.logical_TK)
        if self._with_weights:
            self._weights.append(routed.chosen_TK if later == 1 else routed.chosen_TK * later)

    def stacked(
        self, out: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids_TLK int64 and weights_TLK fp32 or None; layers with fewer choices are padded with id -1 and weight 0.

        Written to `out` where given: tensors of the same shapes and dtypes.
        """
        width = max(ids.shape[1] for ids in self._ids)

        def stack(parts: list[torch.Tensor], fill: int, out: torch.Tensor | None) -> torch.Tensor:
            missing = (width - part.shape[1] for part in parts)  # most often none, and padding by none would copy
            padded = [
                torch.nn.functional.pad(p, (0, n), value=fill) if n else p for p, n in zip(parts, missing, strict=True)
            ]
            return torch.stack(padded, dim=1, out=out)

        return stack(self._ids, -1, out[0]), stack(self._weights, 0, out[1]) if self._with_weights else None
