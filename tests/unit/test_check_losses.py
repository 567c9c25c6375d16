"""scripts/check_losses.py: the quickstart's check on itself."""

import json

import pytest

from megatron.oases.errors import UsageError
from scripts.check_losses import check_fall, check_resumed, read_losses


def falling(first_iteration: int, count: int, start: float, end: float) -> dict[int, float]:
    return {first_iteration + i: start + (end - start) * i / (count - 1) for i in range(count)}


def test_fall_is_told():
    assert check_fall(falling(1, 50, 6.9, 5.0), 1024).startswith("loss 6.900 at first (ln 1024 = 6.931), 5.0")


@pytest.mark.parametrize("end", [6.9, 6.5, float("nan")])
def test_loss_that_does_not_fall_fails(end):
    with pytest.raises(UsageError, match="the loss has not fallen by 0.5"):
        check_fall(falling(1, 50, 6.9, end), 1024)


def test_resumed_run_goes_on_where_the_other_ended():
    before = falling(1, 50, 6.9, 5.0)
    assert check_resumed(falling(51, 5, 5.0, 4.9), before) == (
        "iteration 51 follows 50, at loss 5.000 (this iteration alone) after 5.078 (over the last 5 iterations)")
    with pytest.raises(UsageError, match="not resumed: iteration 1 follows 50"):
        check_resumed(falling(1, 5, 5.0, 4.9), before)
    # The counter was loaded, the weights were not.
    with pytest.raises(UsageError, match="not resumed"):
        check_resumed(falling(51, 5, 6.9, 6.8), before)


def test_reports_are_read(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"iterations": [{"iteration": 3, "time_ms": 1.0, "loss": 2.5}]}))
    assert read_losses(path) == {3: 2.5}
    path.write_text("{}")
    with pytest.raises(UsageError, match="not a report with iterations"):
        read_losses(path)
    with pytest.raises(UsageError, match="absent.json: not a report"):
        read_losses(tmp_path / "absent.json")
