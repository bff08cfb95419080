"""Triton decides at its first import whether kernels are interpreted, and any test may be the first to import it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


if interpreter is not None:
    _patch = interpreter._patch_lang_tensor

    def _range_takes_tensors(tensor, scope):
        """Triton 3.6 interprets a loop's bounds as arrays of one element, which NumPy 2.4 no longer converts."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _range_takes_tensors
