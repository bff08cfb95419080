"""The kernels' cases and benchmarks/ are importable by the tests of this folder; the kernels run interpreted."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "benchmarks")]
