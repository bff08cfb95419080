"""AMD GPUs have run nothing of this; that every kernel compiles for one can be known without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_every_portable_kernel_compiles_for_amd(tmp_path):
    from gpu_memcheck import launched_kernels

    pytest.importorskip("triton.backends.amd", reason="this Triton was built without AMD")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", HERE)))}
    script = [sys.executable, str(HERE / "compile_for_amd.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {what for _, what in lines} == {"hsaco"}
    portable = {name.split(".")[1] for name, module in launched_kernels().items() if module != "grouped_hopper"}
    assert {name for name, _ in lines} == portable
