"""No step of an engine waits for a compiler: what later steps launch is compiled at start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def examined(*arguments: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))
    script = [sys.executable, str(HERE / "launched_forms.py"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_start_launches_every_form_of_a_kernel_that_a_later_step_launches():
    from gpu_memcheck import launched_kernels

    from truegate.kernels.grouped import GLUON_IS_KNOWN

    scenes = examined()
    for scene in scenes:
        assert not scene["late"], "\n".join([scene["scene"], *scene["late"]])
    kernels = {*launched_kernels(), *(["grouped_hopper._grouped"] if GLUON_IS_KNOWN else [])}
    assert {kernel for scene in scenes for kernel in scene["kernels"]} == kernels


def test_the_one_form_that_sums_any_number_of_parts_adds_them_in_order():
    from truegate.kernels.gate import _sum_kernel

    torch.manual_seed(0)
    for num_parts, num_out, block in ((2, 8, 256), (8, 60, 256), (9, 8, 1024), (10, 60, 256), (32, 8, 1024)):
        parts_STE = torch.randn(num_parts, 7, num_out)
        parts_STE[:, 0], parts_STE[0, 1] = -0.0, float("inf")
        y_TE = torch.empty(7, num_out)
        _sum_kernel[(2,)](parts_STE, y_TE, 7, num_parts, E=num_out, BLOCK=block, EARLY=False)
        total_TE = parts_STE[0].clone()
        for part_TE in parts_STE[1:]:
            total_TE += part_TE
        assert torch.equal(y_TE.view(torch.int32), total_TE.view(torch.int32))


def test_a_form_that_start_leaves_out_is_found():
    (scene,) = examined("qwen3, short steps", "--later-splits", "64")
    assert {line.split()[0] for line in scene["late"]} == {"attention._decode_kernel", "attention._combine_kernel"}
    assert all("'SPLITS': '64'" in line for line in scene["late"])
