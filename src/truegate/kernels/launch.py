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


@cache
def device_name(device: torch.device) -> str:
    """What tuned tables know the device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def current(device: torch.device) -> Any:
    """The device's context: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def cdiv(size: int, block: int) -> int:
    """ceil(size / block); Triton's own, made for kernels too, takes 5 us of host time a call."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
