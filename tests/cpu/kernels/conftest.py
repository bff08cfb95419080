"""Kernels run interpreted here, so that their logic is tested without a GPU; set before anything imports them."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))

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
