"""A layer's experts through their kernels: one row's dot products, or order, one grouped product each way, sum.

    h[n] = act(x[t] W_gate^T, x[t] W_up^T);  out[n] = weights[n] * (h[n] W_down^T);  y[t] = sum_j out[t * J + j]

Invariant: a slot whose id is outside 0..P-1 is never read, computed or summed; sums run in slot order in fp32, without
atomics in a value's path; grids depend on shapes only, so everything is graph-safe. Twin: kernels/ref/experts.py.
T rows, J slots a row, N = T * J assignments n = t * J + j, P local experts, D hidden, F expert width,
C columns of a part.
"""

from collections.abc import Callable

import torch

from truegate.kernels.by_rows import by_rows
from truegate.kernels.combine import combine
from truegate.kernels.grouped import grouped_gemm
from truegate.kernels.launch import current
from truegate.kernels.permute import permute
from truegate.kernels.sizes import Sizes, columns_at_once
from truegate.kernels.tuning import Config, Product

PLAIN = Product(block_n=32, block_k=32, stages=2, warps=4)  # where path "rows" cannot run: activation from outside


def experts(
    x_TD: torch.Tensor, gate_up_PHD: torch.Tensor, down_PDF: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None], ids_TJ: torch.Tensor, weights_TJ: torch.Tensor,
    sizes: Sizes, config: Config, *, activate: Callable | None = None,
) -> torch.Tensor:  # fmt: skip
    """y_TD in x's dtype; x_TD and W [P, 2F, D], [P, D, F] contiguous and of one dtype, ids_TJ int32, weights_TJ fp32.

    Launches: no row none; path "rows" 2; "inline" 3, the products and the sum; "ordered" one more for the order, or 3
    more above permute.MANY assignments; the second product and the sum again for every part of `columns_at_once`.
    activate(gate_NF, up_NF) -> h_NF, where given, runs between the products in place of the fused activation, launches
    of its own included; path "rows" is then "inline".
    """
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    with current(x_TD.device):
        if config.path == "rows" and activate is None:
            return by_rows(x_TD, gate_up_PHD, down_PDF, biases, ids_TJ, weights_TJ, sizes, config)
        y_TD = torch.empty_like(x_TD)  # made before what it is computed from: no hole is left below it
        block_m = max(16, config.block_m)
        order = permute(ids_TJ, sizes.num_slots, block_m) if config.path == "ordered" else None
        common = (weights_TJ, ids_TJ, order, sizes, block_m)
        one, two = (PLAIN, PLAIN) if config.path == "rows" else (config.gate_up, config.down)
        h_NF = grouped_gemm(x_TD, gate_up_PHD, biases[0], *common, one, first=True, gated=activate is None)
        if activate is not None:
            h_NF = activate(*h_NF.chunk(2, -1)).contiguous()
        for some in columns_at_once(ids_TJ.numel(), sizes.hidden, y_TD.element_size()):
            bias = None if biases[1] is None else biases[1][:, some]
            out_NC = grouped_gemm(h_NF, down_PDF[:, some], bias, *common, two, first=False, gated=False)
            combine(out_NC, ids_TJ, sizes.num_slots, y_TD[:, some])
            del out_NC  # before the next is made
        return y_TD
