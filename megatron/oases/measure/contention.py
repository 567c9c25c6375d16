"""How much computation and communication slow each other down while both run.

All-reduces of a group are kept in flight during whole training steps: before every operation those that have ended are
followed by new ones, so that the links are never idle. What the operations then take, and how fast the all-reduces then
follow each other, is compared with either alone.
"""

import math
import time
from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from megatron.oases.cost.model import Group
from megatron.oases.cost.profile_file import ContentionCell
from megatron.oases.measure.ranks import Timing, gathered
from megatron.oases.measure.session import Session, StepTimes

_WARM_UP_STEPS = 2
_IN_FLIGHT = 2  # as many as there are sub-batches, as a rule
_MOST_IN_FLIGHT = 32
_ALONE = 10  # all-reduces that are timed alone


class Traffic:
    """All-reduces that follow each other.

    Args:
        group: on which ranks.
        size_bytes: of each.
        in_flight: how many are kept waiting.
        device: where the tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, *, size_bytes: int, in_flight: int, device: torch.device):
        self._group = group
        self._tensors = [torch.zeros(max(1, size_bytes // 4), device=device) for _ in range(in_flight)]
        self._works: deque[dist.Work] = deque()
        self._started = 0

    def keep_up(self) -> None:
        """Starts as many as have ended."""
        _catch_up(self._tensors[0].device)
        while self._works and self._works[0].is_completed():
            self._works.popleft().wait()
        while len(self._works) < len(self._tensors):
            self._start()

    def _start(self) -> None:
        tensor = self._tensors[self._started % len(self._tensors)]
        self._works.append(dist.all_reduce(tensor, group=self._group, async_op=True))
        self._started += 1

    def finish(self) -> int:
        """Waits for all, those included that only other ranks have started; returns how many there were."""
        counts = gathered(self._started)
        most = max(counts[rank] for rank in dist.get_process_group_ranks(self._group))
        while self._works:
            self._works.popleft().wait()
        while self._started < most:
            self._start()
            self._works.popleft().wait()
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize()
        return self._started


def measure_contention(
    session: Session,
    shape: Group,
    group: dist.ProcessGroup,
    *,
    size_bytes: int,
    samples: int,
    repeats: int,
    device: torch.device,
) -> ContentionCell:
    """Times quiet steps, steps under traffic, and quiet steps again.

    Args:
        session: whose operations are to be slowed down.
        shape: of the groups that communicate, all of them at once.
        group: this rank's group of that shape, not the one that the session leaves out.
        size_bytes: of each all-reduce.
        samples: of the micro-batch.
        repeats: steps of each kind.
        device: where tensors lie.
    """
    longest_ms = 0.0
    for step in session.steps(_WARM_UP_STEPS, samples=samples):
        longest_ms = max(ms for _, ms in step.operations)
    alone_ms = _alone_ms(group, size_bytes=size_bytes, in_flight=_IN_FLIGHT, device=device)
    # Nothing is started within an operation: what waits behind the one in flight has to last that long.
    in_flight = max(gathered(min(_MOST_IN_FLIGHT, max(_IN_FLIGHT, math.ceil(2 * longest_ms / alone_ms)))))
    if in_flight > _IN_FLIGHT:
        alone_ms = _alone_ms(group, size_bytes=size_bytes, in_flight=in_flight, device=device)

    def computing_ms() -> list[float]:
        return [_computing_ms(step) for step in session.steps(repeats, samples=samples)]

    session.stopwatch.before = partial(_catch_up, device)
    quiet_ms = computing_ms()
    traffic = Traffic(group, size_bytes=size_bytes, in_flight=in_flight, device=device)
    dist.barrier()
    traffic.keep_up()
    session.stopwatch.before = traffic.keep_up
    start_s = time.perf_counter()
    busy_ms = computing_ms()
    end_s = time.perf_counter()
    session.stopwatch.before = partial(_catch_up, device)
    total = traffic.finish()
    left = (time.perf_counter() - end_s) * 1e3 / alone_ms  # of the all-reduces, when the steps were over
    quiet_ms += computing_ms()  # again, so that a slow drift of the machine is not taken for contention
    session.stopwatch.before = None
    factors = (
        Timing.of(busy_ms).median_ms / Timing.of(quiet_ms).median_ms,
        (end_s - start_s) * 1e3 / max(total - left, 1.0) / alone_ms,
    )
    compute, communication = (max(1.0, *each) for each in zip(*gathered(factors), strict=True))
    return ContentionCell(group_size=shape.size, stride=shape.stride, compute=compute, communication=communication)


def _catch_up(device: torch.device) -> None:
    """On a GPU the host waits for what it has launched, so that it sees which collectives have ended by now."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _computing_ms(step: StepTimes) -> float:
    return sum(ms for operation, ms in step.operations if not operation.kind.is_communication)


def _alone_ms(group: dist.ProcessGroup, *, size_bytes: int, in_flight: int, device: torch.device) -> float:
    """Time of one of many all-reduces, with as many in flight and nothing else to do."""
    tensors = [torch.zeros(max(1, size_bytes // 4), device=device) for _ in range(in_flight)]

    def run(count: int) -> None:
        works: deque[dist.Work] = deque()
        for i in range(count):
            if len(works) == in_flight:
                works.popleft().wait()
            works.append(dist.all_reduce(tensors[i % in_flight], group=group, async_op=True))
        while works:
            works.popleft().wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run(in_flight)
    dist.barrier()
    start_s = time.perf_counter()
    run(_ALONE)
    return max(gathered((time.perf_counter() - start_s) * 1e3 / _ALONE))
