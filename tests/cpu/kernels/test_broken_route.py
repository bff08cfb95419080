"""A route kernel that is broken while it is live, constant by constant, is seen in its layer's coefficients."""

import pytest

pytest.importorskip("triton", reason="kernels run interpreted where triton is installed")

import broken_route_cases as broken

from truegate.moe import selftest
from truegate.moe.basis import Instrument
from truegate.moe.layer import MoELayer

WRONG = 1e-2


def worst(layer: MoELayer) -> float:
    """Of a few rows, with padding and with biases of which most scores are negative; the self-test takes 900."""
    instrument = Instrument(layer)
    found = [instrument.measure(instrument.rows(6)).error]
    if instrument.spec.has_selection_bias:
        instrument.route(bias_around=-3.0)
        found.append(instrument.measure(instrument.rows(3, seed=1)).error)
    return max(found)


@pytest.mark.parametrize("name", broken.SPECS)
def test_layers_with_the_kernel_whole_are_right(name):
    assert worst(broken.layer_of(name)) <= 1e-5


@pytest.mark.parametrize(("name", "constant", "value"), broken.CONSTANTS)
def test_a_broken_constant_is_measured(name, constant, value):
    layer = broken.layer_of(name)
    broken.break_constant(layer.router.route, constant, value)
    assert worst(layer) > WRONG


@pytest.mark.parametrize(("name", "what", "change"), [one for one in broken.INPUTS if one[1] != "no valid"])
def test_wrong_inputs_are_measured(name, what, change):
    layer = broken.layer_of(name)
    broken.mislead(layer, change)
    assert worst(layer) > WRONG


def test_the_self_test_sees_padded_rows_that_are_routed(monkeypatch):
    """Nobody reads the padded rows' sums, so no coefficient shows it: the self-test counts what is computed."""
    for name, few in {"SIZES": (2,), "CROWD": 2, "MIXED": 2}.items():
        monkeypatch.setattr(selftest, name, few)
    layer = broken.layer_of("replicas", experts="torch")  # theirs would take a minute, interpreted
    assert selftest.self_test(layer).ok
    broken.mislead(layer, lambda _: {"valid_T": None})
    wrong = [check.name for check in selftest.self_test(layer).checks if not check.ok]
    assert wrong == ["padding mid-batch", "padding last", "padding all but one"]
