"""These tests need a CUDA device, and triton compiled, not interpreted: run this folder by itself."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "cpu" / "kernels"), str(HERE.parents[1] / "benchmarks")]


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
