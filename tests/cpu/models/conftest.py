"""Makes benchmarks/ importable, and tiny checkpoints that transformers saved, one folder per architecture."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name -> (transformers' model, the folder it was saved to), made once; tests copy a folder before changing it."""
    from tiny_checkpoints import reference, save

    made = {}

    def get(name):
        if name not in made:
            model = reference(name)
            made[name] = model, save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return get
