"""What each name means, in one line: the catalogue's own sentence, or the canary's for names that only it gives.

Invariant: every name that an explanation can carry has a sentence here or in `law.faults`, and one in docs/faults.md.
"""

from collections.abc import Sequence

from truegate.law.faults import FAULTS
from truegate.law.spec import RoutingSpec

# Names that only a measurement gives, or that need no planting.
OWN = {
    "weight-twice": "the routed weight is applied twice: coefficients are squared",
    "weights-ignored": "the routed weights are not applied: every chosen expert counts 1",
    "routed-dropped": "the routed experts are missing",
    "clamp-missing": "gate and up are not clamped",
    "wrong-activation-slope": "the activation's slope is 1, should be 1.702",
    "experts-dropped": "several experts are dropped",
    "rank-missing": "one rank's experts are missing from the sum",
    "experts-permuted": "experts are computed with another expert's weights",
    "routed-scaled": "routed experts count a constant factor too much or too little",
    "shared-scaled": "the shared expert counts a constant factor too much or too little",
    "all-scaled": "routed and shared experts alike count a constant factor too much or too little",
    "rows-lost": "whole rows are lost",
    "choices-lost": "some choices of some rows are lost",
    "batch-activation-scale": "one activation scale is shared by the rows of a batch",
    "dense-layer": "a dense layer is wrong",
    "expert-bias": "the experts' output biases are wrong",
    "unreadable": "answers carry no coefficients",
    "unnamed": "wrong in a way that no known deviation explains",
    "wrong-checkpoint": "the server does not serve this canary",
}
# Pairs that are one mistake.
PAIRS = {
    (
        "scale-missing",
        "shared-inverse-scale",
    ): "the multiply by {scale} after the experts is missing: the shared "
    "expert counts {inverse} as prepared for it, and the routed ones 1/{scale}",
    ("scale-twice", "shared-by-scale"): "everything is multiplied by {scale} once more after the experts",
}


def sentence(names: Sequence[str], spec: RoutingSpec) -> str:
    """One line for one name or a pair."""
    scale = spec.routed_scale
    numbers = {"scale": f"{scale:g}", "inverse": f"{1 / scale:.3f}"}
    for pair, text in PAIRS.items():
        if set(names) == set(pair):
            return text.format(**numbers)
    catalogue = {f.name: f.says for f in FAULTS}
    return "; and ".join((catalogue.get(n) or OWN.get(n) or n).format(**numbers) for n in names)
