"""Import guard: a backend that cannot run here says so, names why, and is refused; there is no silent fallback."""

import importlib
import importlib.util

from truegate.errors import Refused
from truegate.law.contract import Dispatch, Experts, Router


def need(package: str, contract: Router | Experts | Dispatch):
    """The imported package a backend stands on, or Refused with the contract's own reason."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise cannot_run(contract) from error


def cannot_run(contract: Router | Experts | Dispatch) -> Refused:
    """The refusal of a backend whose contract is stated here but which cannot run on this machine."""
    return Refused(f"{type(contract).__name__.lower()} {contract.name} cannot run here: {contract.why_not}")


def need_triton(contract: Router | Experts, device=None) -> None:
    """Refused unless Triton is installed and has a GPU to run on, or its interpreter (TRITON_INTERPRET=1)."""
    part = type(contract).__name__.lower()
    if importlib.util.find_spec("triton") is None:
        raise Refused(f"{part} triton needs the triton package: pip install 'truegate[gpu]', or use --{part} torch")
    on_gpu = importlib.import_module("torch").cuda.is_available() and (device is None or device.type != "cpu")
    if not on_gpu and not importlib.import_module("triton").knobs.runtime.interpret:
        raise Refused(f"{part} triton runs on a GPU, which this layer is not on: use --device cuda, or --{part} torch")
