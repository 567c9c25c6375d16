"""Time spans on the device: with the host's clock, or with events on the GPU's stream, where the host runs ahead."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch


class HostClock:
    """The CPU has finished what a call asks for when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def synchronize(self) -> None:
        """Nothing is outstanding."""


class CudaClock:
    """Events on the current stream; they can be read once the device has passed them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


Clock = HostClock | CudaClock


def clock_of(device: Literal["cuda", "cpu"]) -> Clock:
    return CudaClock() if device == "cuda" else HostClock()


class Stopwatch:
    """Times what runs inside `with stopwatch(key):`; as the observer of a schedule, every operation.

    Args:
        clock: of the device that computes.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.before: Callable[[], None] | None = None  # called before each span, outside of it
        self._spans: list[_Span] = []

    def __call__(self, key: Any) -> "_Span":
        return _Span(self, key)

    def wrap(self, key: Any, function: Callable) -> Callable:
        """The function, timed as `key` whenever it is called."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(key):
                return function(*args, **kwargs)

        return timed

    def take(self) -> list[tuple[Any, float]]:
        """(key, ms) of all spans since the last call, in the order in which they ended."""
        self.clock.synchronize()
        spans, self._spans = self._spans, []
        return [(span.key, self.clock.elapsed_ms(span.start, span.end)) for span in spans]


class _Span:
    __slots__ = ("_stopwatch", "key", "start", "end")

    def __init__(self, stopwatch: Stopwatch, key: Any):
        self._stopwatch = stopwatch
        self.key = key

    def __enter__(self) -> None:
        if self._stopwatch.before is not None:
            self._stopwatch.before()
        self.start = self._stopwatch.clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end = self._stopwatch.clock.mark()
        self._stopwatch._spans.append(self)
