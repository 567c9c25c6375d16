"""What a run says of itself: how long an iteration took and how much communication was hidden, against what its plan predicted."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.oases.meter import Communication, Meter
from megatron.oases.plan.plan import Predicted

# Less than this share of the communication that was predicted to be hidden is worth a warning.
_ENOUGH = 0.8
# Where measuring disturbs what is measured: one iteration in so many, the second of them.
_SAMPLE_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """`communication` is None where the meter was off, `time_ms` where it was on and disturbed."""

    number: int
    time_ms: float | None
    communication: Communication | None


class Evidence:
    """Of one rank.

    Args:
        meter: that its collectives are told to.
        predicted: by the plan, if there is one.
        plan: its name, for messages.
        interval: number of iterations after which a line is wanted; None for one at the end only.
        say: prints a line.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        predicted: Predicted | None,
        plan: str | None,
        interval: int | None,
        say: Callable[[str], None] = functools.partial(print, flush=True),
    ):
        self._meter = meter
        self._predicted = predicted
        self._plan = plan
        self._interval = interval
        self._say = say
        self._iterations: list[Iteration] = []

    def watch(self, train_step: Callable[..., tuple], is_reporter: Callable[[], bool]) -> Callable[..., tuple]:
        """Wraps Megatron's `train_step`. `is_reporter` is asked at each step, since ranks have no role before training."""

        @functools.wraps(train_step)
        def run(*args: Any, iteration: int, **kwargs: Any) -> tuple:
            is_measured = self._is_measured(len(self._iterations))
            self._meter.is_on = is_measured
            start_s = time.perf_counter()
            # Gradient clipping and the loss that is logged need values on the host: a step ends when the device has ended.
            result = train_step(*args, iteration=iteration, **kwargs)
            time_ms = (time.perf_counter() - start_s) * 1e3
            communication = self._meter.take() if is_measured else None
            self._meter.is_on = False  # evaluation is not of interest
            if is_reporter():
                is_timed = not (is_measured and self._meter.disturbs)
                self._iterations.append(
                    Iteration(
                        number=iteration + 1, time_ms=time_ms if is_timed else None, communication=communication
                    )
                )
                if self._interval is not None and len(self._iterations) % self._interval == 0:
                    self._report(self._iterations[-self._interval :])
            return result

        return run

    def _is_measured(self, index: int) -> bool:
        """Of each iteration, from 0: all where that costs nothing, else one in each interval."""
        if not self._meter.disturbs:
            return True
        every = self._interval or _SAMPLE_EVERY
        return index % every == min(1, every - 1)

    def finish(self) -> None:
        """At the end of a run: the line for all of it, but for the first iteration, which warms up."""
        if self._iterations:
            self._report(self._iterations[1:] or self._iterations)

    def _report(self, iterations: list[Iteration]) -> None:
        times_ms = [each.time_ms for each in iterations if each.time_ms is not None]
        measured = [each.communication for each in iterations if each.communication is not None]
        if not (times_ms and measured):  # too few iterations for both
            return
        time_ms = median(times_ms)
        communication = Communication(
            in_flight_ms=median(each.in_flight_ms for each in measured),
            waited_ms=median(each.waited_ms for each in measured),
        )
        plan = self._predicted
        expected = None
        if plan is not None:
            expected = Communication(in_flight_ms=plan.in_flight_ms, waited_ms=plan.waited_ms)
        numbers = f"{iterations[0].number} to {iterations[-1].number}"
        line = f"oases: iterations {numbers}, median: {time_ms:.1f} ms"
        line += "" if plan is None else f" (plan {plan.iteration_ms:.1f})"
        for name, here, there in (
            ("in flight", communication.in_flight_ms, expected and expected.in_flight_ms),
            ("waited for", communication.waited_ms, expected and expected.waited_ms),
        ):
            line += f"; communication {name} {here:.1f} ms" + ("" if expected is None else f" (plan {there:.1f})")
        if communication.hidden is not None:
            line += f"; hidden {communication.hidden:.0%}"
            line += "" if expected is None or expected.hidden is None else f" (plan {expected.hidden:.0%})"
        self._say(line)
        if expected is None or expected.hidden is None or communication.hidden is None:
            return
        if communication.hidden < _ENOUGH * expected.hidden:
            self._say(
                f"oases: warning: {communication.hidden:.0%} of the communication is hidden, less than {_ENOUGH} x "
                f"{expected.hidden:.0%} that {self._plan} predicts: the network or the devices are not as they were when its costs "
                "were taken; profile and plan again"
            )
