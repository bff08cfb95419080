"""Import guard: a backend that cannot run here says so, names why, and is refused; there is no silent fallback."""

import importlib

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
