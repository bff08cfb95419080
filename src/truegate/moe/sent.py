"""What passes between exchange and kernel, and the weights a kernel stands on. Any array library.

T rows, J slots a row, P local slots, D hidden, F expert width, H = 2F (gate rows, then up rows).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sent:
    """What the kernel reads: x_TD, ids_TJ in the local id space, weights_TJ; identity_T multiplies x at combine."""

    x_TD: Any
    ids_TJ: Any
    weights_TJ: Any
    identity_T: Any = None


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """gate_up_PHD [P, 2F, D], down_PDF [P, D, F] in the run's dtype; biases [P, 2F] and [P, D], or None."""

    gate_up_PHD: Any
    down_PDF: Any
    gate_up_bias_PH: Any = None
    down_bias_PD: Any = None
