"""select against the router modules of transformers: the parity table's own comparison, on fewer random rows.

`benchmarks/router_parity.py` runs the same on 10,000 rows a model and prints the table.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from truegate.law.spec import Denominator, GroupScore, Score, SelectOn

_PATH = Path(__file__).parents[3] / "benchmarks" / "router_parity.py"
_SPEC = importlib.util.spec_from_file_location("router_parity", _PATH)
parity = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(parity)

CASE = {case.model: case for case in parity.CASES}
V3, V2, ERNIE = CASE["DeepSeek-V3, R1"], CASE["DeepSeek-V2"], CASE["ERNIE-4.5-21B-A3B"]


@pytest.mark.parametrize("model", CASE)
def test_select_chooses_and_weighs_as_transformers_does(model):
    report = parity.run_case(CASE[model], num_rows=1000, seed=1)
    assert report.rows > 1000
    assert report.nan_rows > 0
    assert not report.failed, report


def changed(spec, axes):
    """The spec with some axes changed, `groups_NAME` meaning an axis of its groups."""
    groups = {k.removeprefix("groups_"): v for k, v in axes.items() if k.startswith("groups_")}
    axes = {k: v for k, v in axes.items() if not k.startswith("groups_")}
    return replace(spec, **axes, **({"groups": replace(spec.groups, **groups)} if groups else {}))


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        (V3, {"groups_score": GroupScore.MAX}),
        (V3, {"groups_fill": 0.0}),
        (V3, {"groups_kept": 5}),
        (V3, {"groups": None}),
        (V3, {"routed_scale": 1.0}),
        (V3, {"denominator": Denominator.NONE}),
        (V3, {"eps": 1e-4}),
        (V3, {"score": Score.SOFTMAX}),
        (V2, {"groups_score": GroupScore.TOP2_SUM}),
        (V2, {"denominator": Denominator.SUM}),
        (CASE["LFM2-8B-A1B (select only)"], {"eps": 1e-20}),
        (CASE["Llama-4-Maverick"], {"select_on": SelectOn.SCORES}),
        (CASE["gpt-oss-20b"], {"denominator": Denominator.NONE}),
        (ERNIE, {"eps": 0.5}),
    ],
    ids=lambda value: value.model if hasattr(value, "model") else str(value),
)
def test_the_comparison_sees_a_wrong_axis(case, axes):
    assert parity.run_case(case, num_rows=200, mutate=lambda spec: changed(spec, axes)).failed
