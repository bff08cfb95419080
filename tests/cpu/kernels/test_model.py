"""A whole model through the kernels, interpreted, gives the logits of the same model without them."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3"])
def test_kernels_give_the_logits_of_torch(name, tmp_path):
    """Decodes beside a chunk with a prefix and padded rows; pages scattered, NaN where nothing was written."""
    from parity import Paged, worst
    from tiny_checkpoints import reference, save

    from truegate.models import load_model

    model = load_model(save(reference(name, num_hidden_layers=2), tmp_path))
    prompts = [torch.arange(n) % 200 + 3 for n in (3, 19)]
    found = []
    for model.uses_kernels in (False, True):
        paged = Paged(model, prompts)
        paged.step([(1, 0, 10)])
        paged.step([(0, 0, 1), (1, 10, 18)], pads=2)
        paged.step([(0, 1, 2)])
        paged.step([(0, 2, 3), (1, 18, 19)], pads=1)
        found.append(paged.logits)
    assert worst(found[1], found[0]) < 1e-5
