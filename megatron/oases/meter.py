"""How long a rank's collectives are in flight, and how long its computation stands still for them: what a run itself can tell.

Slow-down of computation by what is in flight does not show here; that takes a run without collectives (`--oases-only compute`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Of some time of one rank.

    Args:
        in_flight_ms: while at least one collective was.
        waited_ms: while computation stood still for one.
    """

    in_flight_ms: float
    waited_ms: float

    @property
    def hidden(self) -> float | None:
        """Share of the time in flight in which something was computed; None where nothing was in flight."""
        if self.in_flight_ms == 0:
            return None
        return min(max(1 - self.waited_ms / self.in_flight_ms, 0.0), 1.0)


class Meter(Protocol):
    """Told of each collective by who starts it, while it is on.

    `disturbs`: whether what it does may cost overlap, so that only samples should be taken.
    """

    disturbs: ClassVar[bool]
    is_on: bool

    @contextmanager
    def starting(self) -> Iterator["Flight"]:
        """Round the start of a collective. The flight wants its work, and gives it up: a work holds its tensors."""

    @contextmanager
    def waiting(self, flight: "Flight") -> Iterator[None]:
        """Round the wait for it."""

    def take(self) -> Communication:
        """What was since the last call. All that was started must have been waited for."""


@dataclass(slots=True)
class Flight:
    """One collective. Times are seconds of the host's clock, or events."""

    start: float | torch.cuda.Event
    work: dist.Work | None = None
    end: float | torch.cuda.Event | None = None


@dataclass
class HostMeter:
    """For gloo, whose collectives end on threads of their own while the host computes.

    Its reduce-scatter tells nobody when it has ended: that counts as in flight until it was waited for.
    """

    disturbs: ClassVar[bool] = False
    is_on: bool = False
    _flights: list[Flight] = field(default_factory=list)
    _waited_s: float = 0.0

    @contextmanager
    def starting(self) -> Iterator[Flight]:
        flight = Flight(time.perf_counter())
        yield flight

        def ended(_: torch.futures.Future) -> None:
            flight.end = flight.end or time.perf_counter()

        try:
            flight.work.get_future().add_done_callback(ended)
        except RuntimeError:  # "not implemented"
            pass
        flight.work = None
        self._flights.append(flight)

    @contextmanager
    def waiting(self, flight: Flight) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        self._waited_s += end_s - start_s
        flight.end = flight.end or end_s

    def take(self) -> Communication:
        flights, waited_s = self._flights, self._waited_s
        self._flights, self._waited_s = [], 0.0
        spans_ms = [(flight.start * 1e3, flight.end * 1e3) for flight in flights]
        return Communication(in_flight_ms=union_ms(spans_ms), waited_ms=waited_s * 1e3)


@dataclass
class CudaMeter:
    """For NCCL: events on the stream that computes, and, for the ends, on one that only waits.

    With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) such an event may hold up what is issued after it.
    """

    disturbs: ClassVar[bool] = True
    is_on: bool = False
    _flights: list[Flight] = field(default_factory=list)
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _side: torch.cuda.Stream | None = None

    @contextmanager
    def starting(self) -> Iterator[Flight]:
        flight = Flight(_event())
        yield flight
        self._side = self._side or torch.cuda.Stream()
        with torch.cuda.stream(self._side):
            flight.work.wait()
            flight.end = _event()
        flight.work = None
        self._flights.append(flight)

    @contextmanager
    def waiting(self, flight: Flight) -> Iterator[None]:
        start = _event()
        yield
        self._waits.append((start, _event()))

    def take(self) -> Communication:
        flights, waits = self._flights, self._waits
        self._flights, self._waits = [], []
        if not flights:
            return Communication(in_flight_ms=0.0, waited_ms=0.0)
        torch.cuda.synchronize()
        first = flights[0].start
        spans_ms = [(first.elapsed_time(flight.start), first.elapsed_time(flight.end)) for flight in flights]
        waited_ms = sum(start.elapsed_time(end) for start, end in waits)
        return Communication(in_flight_ms=union_ms(spans_ms), waited_ms=waited_ms)


def meter_of(backend: str) -> Meter:
    """For collectives of `gloo` or `nccl`."""
    return HostMeter() if backend == "gloo" else CudaMeter()


def union_ms(spans_ms: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    total_ms, until_ms = 0.0, float("-inf")
    for start_ms, end_ms in sorted(spans_ms):
        total_ms += max(0.0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
