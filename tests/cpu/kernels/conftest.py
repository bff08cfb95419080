"""The kernels' cases are importable by the tests of this folder; the kernels run interpreted (tests/conftest.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
