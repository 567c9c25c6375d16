"""The simulated time of one device: one compute lane, and lanes on which collectives run beside it.

A lane runs its collectives one after another, in the order in which they were started. Computation and communication
slow each other down while both run, so how long either takes is known only once it is over: time advances from one end to
the next.
"""

from collections import deque
from collections.abc import Iterable

from megatron.oases.cost.model import Contention


class Transfer:
    """A collective that was started. `end_ms` is None until it is over.

    Args:
        alone_ms: how long it takes with nothing computed meanwhile.
        contention: what happens otherwise.
    """

    __slots__ = ("alone_ms", "contention", "remaining_ms", "start_ms", "end_ms")

    def __init__(self, alone_ms: float, contention: Contention):
        self.alone_ms = alone_ms
        self.contention = contention
        self.remaining_ms = alone_ms
        self.start_ms: float | None = None
        self.end_ms: float | None = None


class Lane:
    """Collectives that share a stream: tensor-parallel ones of all sub-groups, or data-parallel ones."""

    __slots__ = ("queue", "busy_ms")

    def __init__(self):
        self.queue: deque[Transfer] = deque()
        self.busy_ms = 0.0  # sum of what was started, alone


class Clock:
    """Time from 0 on. `now_ms` is where the compute lane stands."""

    def __init__(self, lanes: Iterable[Lane]):
        self.now_ms = 0.0
        self._lanes = tuple(lanes)

    def start(self, lane: Lane, alone_ms: float, contention: Contention) -> Transfer:
        """Starts a collective, behind those that the lane has already."""
        transfer = Transfer(alone_ms, contention)
        lane.busy_ms += alone_ms
        if not lane.queue:
            transfer.start_ms = self.now_ms
        if alone_ms > 0 or lane.queue:
            lane.queue.append(transfer)
        else:
            transfer.end_ms = self.now_ms
        return transfer

    def compute(self, alone_ms: float) -> None:
        """Computes what would take `alone_ms` with nothing in flight."""
        remaining_ms = alone_ms
        while remaining_ms > 0:
            in_flight = [lane for lane in self._lanes if lane.queue]
            if not in_flight:
                self.now_ms += remaining_ms
                return
            slowdown = 1.0
            for lane in in_flight:
                slowdown *= lane.queue[0].contention.compute
            step_ms, end_ms = remaining_ms * slowdown, None
            for lane in in_flight:
                until_end_ms = lane.queue[0].remaining_ms * lane.queue[0].contention.communication
                if until_end_ms <= step_ms:
                    step_ms, end_ms = until_end_ms, until_end_ms
            # Not a difference of two nearly equal numbers where the computation itself ends.
            remaining_ms = 0.0 if end_ms is None else remaining_ms - step_ms / slowdown
            self._communicate(in_flight, step_ms, computing=True)

    def wait(self, transfer: Transfer) -> None:
        """Does nothing until the collective is over."""
        while transfer.end_ms is None:
            in_flight = [lane for lane in self._lanes if lane.queue]
            self._communicate(in_flight, min(lane.queue[0].remaining_ms for lane in in_flight), computing=False)

    def drain(self, lane: Lane) -> None:
        """Does nothing until all that the lane has is over."""
        if lane.queue:
            self.wait(lane.queue[-1])

    def _communicate(self, in_flight: list[Lane], step_ms: float, *, computing: bool) -> None:
        self.now_ms += step_ms
        for lane in in_flight:
            head = lane.queue[0]
            slowdown = head.contention.communication if computing else 1.0
            if head.remaining_ms * slowdown <= step_ms:
                self._end(lane)
            else:
                head.remaining_ms -= step_ms / slowdown

    def _end(self, lane: Lane) -> None:
        lane.queue.popleft().end_ms = self.now_ms
        while lane.queue:
            lane.queue[0].start_ms = self.now_ms
            if lane.queue[0].remaining_ms > 0:
                return
            lane.queue.popleft().end_ms = self.now_ms
