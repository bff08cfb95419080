"""Without a GPU every script that needs one says so in one line with the remedy, before anything else: exit code 2."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INTERPRETED = {"gpu_memcheck"}  # runs its groups without a GPU too
SCRIPTS = [
    *((path.stem, []) for path in sorted(BENCHMARKS.glob("gpu_*.py")) if path.stem not in INTERPRETED),
    ("tune_experts", []),
    ("canary_engine", ["--device", "cuda"]),
    ("canary_precision", ["--device", "cuda"]),
]
NEEDED = {"gpu_decode": ["qwen3"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so they would run")
@pytest.mark.parametrize(("script", "words"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_a_script_for_the_gpu_refuses_in_one_line_without_one(script, words, monkeypatch, capsys):
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    path = BENCHMARKS / f"{script}.py"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(path), *NEEDED.get(script, []), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{script}.py needs a CUDA GPU")
    assert "run it on a machine that has one" in err
