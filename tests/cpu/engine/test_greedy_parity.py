"""Greedy answers are transformers' in every way of batching (all architectures by benchmarks/greedy_parity.py)."""

import greedy_parity
import pytest


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-MoE"])
def test_no_greedy_token_differs_in_any_mode(name):
    found = greedy_parity.compare(name, 5, 16, list(greedy_parity.MODES))
    assert {mode: wrong for mode, (wrong, _) in found.items()} == dict.fromkeys(greedy_parity.MODES, 0)
    assert all(left_open < 10 for _, left_open in found.values())
