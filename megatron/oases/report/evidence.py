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


@dataclass(frozen=True, kw_only=True)
class Iteration:
    number: int
    time_ms: float
    communication: Communication


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
            self._meter.take()  # what an evaluation has left
            start_s = time.perf_counter()
            # Gradient clipping and the loss that is logged need values on the host: a step ends when the device has ended.
            result = train_step(*args, iteration=iteration, **kwargs)
            time_ms = (time.perf_counter() - start_s) * 1e3
            communication = self._meter.take()
            if is_reporter():
                self._iterations.append(
                    Iteration(number=iteration + 1, time_ms=time_ms, communication=communication)
                )
                if self._interval is not None and len(self._iterations) % self._interval == 0:
                    self._report(self._iterations[-self._interval :])
            return result

        return run

    def finish(self) -> None:
        """At the end of a run: the line for all of it, but for the first iteration, which warms up."""
        if self._iterations:
            self._report(self._iterations[1:] or self._iterations)

    def _report(self, iterations: list[Iteration]) -> None:
        time_ms = median(each.time_ms for each in iterations)
        communication = Communication(
            in_flight_ms=median(each.communication.in_flight_ms for each in iterations),
            waited_ms=median(each.communication.waited_ms for each in iterations),
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
