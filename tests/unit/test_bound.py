import pytest

from megatron.oases.report.bound import Bound


def bound(measured: float, compute: float, communication: float) -> Bound:
    return Bound(measured_ms=measured, compute_only_ms=compute, communication_only_ms=communication)


def test_the_bound_is_the_slower_half():
    assert bound(200, 120, 100).bound_ms == 120
    assert bound(200, 100, 120).bound_ms == 120


def test_efficiency():
    assert bound(200, 120, 100).efficiency == pytest.approx(0.6)


@pytest.mark.parametrize(
    "measured, hidden",
    [
        (220, 0.0),  # one half after the other
        (170, 0.5),
        (120, 1.0),  # nothing on top of computation
        (300, 0.0),  # waiting beyond both
        (110, 1.0),  # noise
    ],
)
def test_the_share_of_communication_hidden_is_between_none_and_all(measured, hidden):
    assert bound(measured, 120, 100).communication_hidden == hidden
