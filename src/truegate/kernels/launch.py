"""How kernels are started: on the tensors' device, and where the device can, before the kernel ahead of them has ended.

Invariant: a kernel that may start early waits in `take_turn` before it reads or writes anything another one touches.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Wait for the kernels ahead; from here on the next one may be brought in, to wait here in its turn."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Launch options: programmatic dependent launch on NVIDIA sm_90 and newer, else an ordinary launch."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def current(device: torch.device) -> Any:
    """The device's context: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
