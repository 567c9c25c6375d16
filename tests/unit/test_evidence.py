"""What a run says of itself, and how collectives are timed."""

import threading

import pytest
import torch

from megatron.oases.meter import Communication, HostMeter, union_ms
from megatron.oases.plan.plan import Predicted
from megatron.oases.report.evidence import Evidence


def test_the_union_of_spans():
    assert union_ms([]) == 0
    assert union_ms([(0, 2), (5, 6)]) == 3
    assert union_ms([(1, 4), (0, 2), (3, 3.5)]) == 4, "in any order, overlapping or inside one another"


def test_hidden_is_what_was_not_waited_for():
    assert Communication(in_flight_ms=10, waited_ms=2).hidden == 0.8
    assert Communication(in_flight_ms=10, waited_ms=11).hidden == 0
    assert Communication(in_flight_ms=0, waited_ms=0).hidden is None


class _Work:
    """A collective that ends when it is told to."""

    def __init__(self):
        self._future = torch.futures.Future()

    def get_future(self):
        return self._future

    def end(self):
        self._future.set_result(None)


def _fly(meter, seconds: float):
    with meter.starting() as flight:
        flight.work = work = _Work()
    threading.Timer(seconds, work.end).start()
    return flight, work


def test_what_does_not_say_when_it_ends_is_in_flight_until_it_was_waited_for():
    class Silent:
        def get_future(self):
            raise RuntimeError("Work::getFuture not implemented.")

    meter, pause = HostMeter(), threading.Event()
    with meter.starting() as flight:
        flight.work = Silent()
    pause.wait(0.05)
    with meter.waiting(flight):
        pause.wait(0.02)
    told = meter.take()
    assert told.in_flight_ms >= 70 > told.waited_ms >= 20


def test_the_host_times_what_ends_on_another_thread():
    meter, pause = HostMeter(), threading.Event()
    _fly(meter, 0.05)
    pause.wait(0.1)  # computes for longer than the collective takes: it is hidden
    hidden = meter.take()
    assert 45 <= hidden.in_flight_ms < 95 and hidden.waited_ms == 0
    flight, work = _fly(meter, 0.05)
    with meter.waiting(flight):
        work.get_future().wait()
    waited = meter.take()
    assert waited.waited_ms == pytest.approx(waited.in_flight_ms, abs=20)
    assert meter.take() == Communication(in_flight_ms=0, waited_ms=0), "each is told once"


class _Meter:
    """Gives what it was made with."""

    def __init__(self, *taken, disturbs=False):
        self._taken = iter(taken)
        self.disturbs, self.is_on = disturbs, False

    def take(self):
        return next(self._taken)


PLANNED = Predicted(by="simulator", iteration_ms=1000, exposed_ms=90, in_flight_ms=100, waited_ms=10, memory_bytes=1)


def _lines(waited_ms, *, predicted=PLANNED, interval=None, reports=True):
    said = []
    meter = _Meter(*(Communication(in_flight_ms=100, waited_ms=ms) for ms in waited_ms))
    evidence = Evidence(meter, predicted=predicted, plan="--oases-plan plan.json", interval=interval, say=said.append)
    step = evidence.watch(lambda *args, iteration: ("result", args, iteration), lambda: reports)
    for number in range(len(waited_ms)):
        assert step("model", iteration=number) == ("result", ("model",), number)
    evidence.finish()
    return said


def test_one_line_at_the_end_without_the_first_iteration():
    (line,) = _lines([99, 10, 20, 12])
    assert line.startswith("oases: iterations 2 to 4, median: ")
    assert "(plan 1000.0); communication in flight 100.0 ms (plan 100.0); waited for 12.0 ms (plan 10.0)" in line.replace(
        "communication waited", "waited"
    )
    assert line.endswith("hidden 88% (plan 90%)")
    assert "iterations 1 to 1" in _lines([10])[0], "there is no other"


def test_lines_in_between():
    said = _lines([10, 20, 30, 40, 50], interval=2)
    assert [line.partition(",")[0] for line in said if "warning" not in line] == [
        "oases: iterations 1 to 2", "oases: iterations 3 to 4", "oases: iterations 2 to 5"
    ]  # fmt: skip


def test_evaluation_is_not_measured():
    meter = _Meter(Communication(in_flight_ms=1, waited_ms=1))
    seen = []
    evidence = Evidence(meter, predicted=None, plan=None, interval=None, say=lambda line: None)
    evidence.watch(lambda *, iteration: seen.append(meter.is_on), lambda: True)(iteration=0)
    assert seen == [True] and not meter.is_on


@pytest.mark.parametrize(("interval", "metered"), [(None, [1]), (3, [1, 4]), (1, [0, 1, 2, 3, 4])])
def test_a_meter_that_disturbs_takes_samples_which_are_not_timed(interval, metered):
    communication = Communication(in_flight_ms=100, waited_ms=20)
    meter, seen, said = _Meter(*[communication] * 5, disturbs=True), [], []
    evidence = Evidence(meter, predicted=None, plan=None, interval=interval, say=said.append)
    step = evidence.watch(lambda *, iteration: seen.append(meter.is_on), lambda: True)
    for number in range(5):
        step(iteration=number)
    assert [number for number, is_on in enumerate(seen) if is_on] == metered
    evidence.finish()
    # With every iteration disturbed there is no honest time to tell.
    assert bool(said) == (interval != 1)


def test_a_flight_keeps_no_work():
    """A work holds its tensors, and flights are kept for an iteration."""
    meter = HostMeter()
    with meter.starting() as flight:
        flight.work = work = _Work()
    assert flight.work is None
    work.end()
    assert meter.take().in_flight_ms >= 0


def test_a_warning_where_a_fifth_less_is_hidden_than_predicted():
    assert len(_lines([27, 27])) == 1, "73 % is more than 0.8 x 90 %"
    line, warning = _lines([29, 29])
    assert "warning: 71% of the communication is hidden, less than 0.8 x 90% that --oases-plan plan.json predicts" in warning


def test_without_a_plan_and_on_other_ranks():
    (line,) = _lines([28, 28], predicted=None)
    assert "plan" not in line and line.endswith("hidden 72%")
    assert _lines([28, 28], reports=False) == []
