"""A MoE layer inside CUDA graphs at a few row counts, for the self-test: what a captured step computes is measured too.

Invariant: a call of T rows runs in the next larger graph, whose other rows are NaN and not valid. T rows, B of a graph.
"""

from types import SimpleNamespace
from typing import Any

import torch

from truegate.moe.layer import MoELayer

SIZES = (1, 4, 16, 48)  # one row has kernels of its own


class CapturedLayer:
    """A callable (x_TD, step) -> y_TD like the layer itself; a graph is captured when its size is first needed."""

    def __init__(self, layer: MoELayer) -> None:
        self.layer = layer
        self._captured: dict[int, SimpleNamespace] = {}

    def __call__(self, x_TD: torch.Tensor, step: Any) -> torch.Tensor:
        num_rows = len(x_TD)
        size = next(size for size in SIZES if size >= num_rows)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        captured = self._captured[size]
        captured.x_buf.fill_(float("nan"))[:num_rows] = x_TD
        captured.step.valid_T.fill_(False)[:num_rows] = True if step.valid_T is None else step.valid_T
        captured.step.token_ids_T[:num_rows] = step.token_ids_T
        captured.graph.replay()
        return captured.y_BD[:num_rows].clone()

    def _capture(self, size: int) -> SimpleNamespace:
        device = self.layer.w_down.device
        x_buf = torch.zeros(size, self.layer.spec.hidden, dtype=self.layer.w_down.dtype, device=device)
        step = SimpleNamespace(
            token_ids_T=torch.zeros(size, dtype=torch.int64, device=device),
            valid_T=torch.ones(size, dtype=torch.bool, device=device), all_valid=False, recorder=None)  # fmt: skip
        self.layer(x_buf, step)  # compiles, and lets libraries allocate
        torch.cuda.synchronize(device)  # sync: start-up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_BD = self.layer(x_buf, step)
        return SimpleNamespace(x_buf=x_buf, step=step, graph=graph, y_BD=y_BD)
