"""Where a benchmark ran: the first line that it prints; and whether it can run here at all."""

import importlib.metadata
import platform
import sys
from pathlib import Path

import torch


def versions(*, cpu: bool = False) -> str:
    """The GPU, where there is none or with `cpu` the processor; torch, Triton and transformers if installed, Python.

    Read from what is installed: nothing is imported for it.
    """
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() and not cpu else _processor()
    return ", ".join([chip, f"torch {torch.__version__}", *_installed(), f"Python {platform.python_version()}"])


def need_gpu(device: str = "cuda") -> None:
    """End with one line and exit code 2 where `device` is a GPU and torch sees none; a script calls it first of all."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return
    script = Path(sys.argv[0]).name
    print(
        f"{script} needs a CUDA GPU, and torch {torch.__version__} sees none here: run it on a machine that has one, "
        "with a CUDA build of torch",
        file=sys.stderr,
    )
    sys.exit(2)


def _installed() -> list[str]:
    found = []
    for name, *distributions in (("triton", "triton", "pytorch-triton", "pytorch-triton-rocm"), ("transformers",) * 2):
        for distribution in distributions:
            try:
                found.append(f"{name} {importlib.metadata.version(distribution)}")
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"CPU {platform.machine()}"
