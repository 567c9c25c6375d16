import json
import math

from megatron.oases.report.iterations import IterationReport, report_steps


def _report(tmp_path) -> tuple[IterationReport, callable]:
    path = tmp_path / "report.json"
    return IterationReport(path, {"world_size": 2}), lambda: json.loads(path.read_text())


def test_full_precision_and_context(tmp_path):
    report, read = _report(tmp_path)
    report.add(iteration=7, time_ms=12.5, loss=1 / 3, skipped=False)
    assert read() == {
        "schema_version": 1,
        "world_size": 2,
        "iterations": [{"iteration": 7, "time_ms": 12.5, "loss": 1 / 3, "skipped": False}],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_killed_run_has_left_most_of_it(tmp_path):
    report, read = _report(tmp_path)
    for iteration in range(1, 26):
        report.add(iteration=iteration, time_ms=1.0, loss=1.0, skipped=False)
        assert len(read()["iterations"]) > iteration - 10
    report.write()
    assert len(read()["iterations"]) == 25


def test_no_infinity_in_json(tmp_path):
    report, read = _report(tmp_path)
    for loss in (math.inf, math.nan, None):
        report.add(iteration=1, time_ms=1.0, loss=loss, skipped=True)
    report.write()
    assert [iteration["loss"] for iteration in read()["iterations"]] == [None, None, None]


class _Loss(float):
    def item(self) -> float:
        return float(self)


def test_steps_are_passed_on_and_measured(tmp_path):
    events = []

    def train_step(*args, iteration, extra):
        events.append(("step", args, iteration, extra))
        return {"lm loss": _Loss(0.25)}, 0, "rest"

    for reporter, expected in ((True, [(5, 0.25)]), (False, [])):
        report, read = _report(tmp_path)
        step = report_steps(
            train_step, report, is_reporter=lambda: reporter, synchronize=lambda: events.append("synchronized")
        )
        assert step("a", iteration=4, extra="b") == ({"lm loss": 0.25}, 0, "rest")
        report.write()
        assert [(entry["iteration"], entry["loss"]) for entry in read()["iterations"]] == expected
        assert events == ["synchronized", ("step", ("a",), 4, "b"), "synchronized"]
        events.clear()
