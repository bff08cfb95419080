"""Twin of kernels/combine.py, in float64."""

import torch


def combine(out_ND: torch.Tensor, ids_TJ: torch.Tensor, num_slots: int) -> torch.Tensor:
    """y[t] = sum_j out[t * J + j] over valid slots."""
    ok_TJ = (ids_TJ >= 0) & (ids_TJ < num_slots)
    out_TJD = out_ND.double().reshape(*ids_TJ.shape, -1)
    return torch.where(ok_TJ[..., None], out_TJD, 0.0).sum(1)
