"""Twin of kernels/experts.py and of kernels/by_rows.py: a layer's experts, through the twins of their parts."""

import torch

from truegate.kernels.ref.combine import combine
from truegate.kernels.ref.grouped import down, gate_up
from truegate.kernels.sizes import Sizes


def experts(x_TD, gate_up_PHD, down_PDF, biases, ids_TJ, weights_TJ, sizes: Sizes) -> torch.Tensor:
    """y_TD in float64."""
    s = sizes
    h_NF = gate_up(x_TD, gate_up_PHD, biases[0], weights_TJ, ids_TJ, s.activation, s.clamp,
                   at_input=s.weigh(first=True) == "input")  # fmt: skip
    out_ND = down(h_NF, down_PDF, biases[1], weights_TJ, ids_TJ, at_output=s.weigh(first=False) == "output")
    return combine(out_ND, ids_TJ, s.num_slots)
