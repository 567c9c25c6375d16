"""Training steps with one half left out: computation alone, or the tensor-parallel communication alone.

No order of the same operations can be faster than the slower half, so the two times bound what any schedule can reach.

Collectives are caught where they reach the process group. Megatron takes torch's functions into several of its modules
when it is imported; the group is the one place that all of them pass.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.oases.host.replacements import Replacements

_MAX_IN_FLIGHT = 2

# What torch.distributed.all_reduce, all_gather_into_tensor and reduce_scatter_tensor call on a process group.
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER = "allreduce", "all_gather_single", "reduce_scatter_single"

TrainStep = Callable[..., tuple]
GetGroup = Callable[[], dist.ProcessGroup]


def compute_only(train_step: TrainStep, get_group: GetGroup) -> TrainStep:
    """Wraps Megatron's `train_step` so that it runs without the collectives of one group.

    An all-reduce leaves the rank's own share, a reduce-scatter its own part of it; an all-gather repeats the rank's own
    part. So every value stays finite and of its usual size, and arithmetic takes the time that it always takes. The
    ranks train models of their own, and the losses mean nothing.

    Args:
        train_step: `megatron.training.training.train_step`.
        get_group: the tensor-parallel group; asked for at each step, since there is none before training starts.
    """

    @functools.wraps(train_step)
    def run(*args: Any, **kwargs: Any) -> tuple:
        group, left_out = get_group(), 0

        def leave_out(name: str, original: Callable, *arguments: Any) -> _Finished:
            nonlocal left_out
            left_out += 1
            _fill_with_own(name, arguments, group)
            return _Finished()

        with _caught(group, leave_out):
            result = train_step(*args, **kwargs)
        _check_some(left_out)
        return result

    return run


def communication_only(train_step: TrainStep, get_group: GetGroup) -> TrainStep:
    """Wraps Megatron's `train_step` so that only the collectives of one group run.

    The first step runs as it is, and tells which collectives there are. Each later one starts the same in the same
    order on zeros, and up to two are in flight at once, also where the step itself waits for each: what bounds a system
    is what its collectives need, not how it waits for them. It has no loss.

    Args:
        train_step: `megatron.training.training.train_step`.
        get_group: the tensor-parallel group; asked for at each step, since there is none before training starts.
    """
    recording: _Recording | None = None
    without_loss: tuple = ()

    @functools.wraps(train_step)
    def run(*args: Any, **kwargs: Any) -> tuple:
        nonlocal recording, without_loss
        if recording is not None:
            recording.replay()
            return without_loss
        recording = _Recording(get_group())
        with _caught(get_group(), recording.run_and_add):
            result = train_step(*args, **kwargs)
        _check_some(len(recording.collectives))
        without_loss = ({}, *result[1:])
        return result

    return run


def starting_together(train_step: TrainStep) -> TrainStep:
    """Wraps a step so that all ranks start it at the same time, as computation before it would have made them."""

    @functools.wraps(train_step)
    def run(*args: Any, **kwargs: Any) -> tuple:
        dist.barrier()
        return train_step(*args, **kwargs)

    return run


@contextmanager
def _caught(group: dist.ProcessGroup, handle: Callable[..., Any]) -> Iterator[None]:
    """Calls `handle(name, original, *arguments)` for the collectives of `group`; other groups' run as they are."""
    replacements = Replacements()

    def caught(name: str, original: Callable) -> Callable:
        def method(self: dist.ProcessGroup, *arguments: Any) -> Any:
            return handle(name, original, *arguments) if self is group else original(self, *arguments)

        return method

    try:
        for name in (_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER):
            replacements.set(type(group), name, caught(name, getattr(type(group), name)))
        yield
    finally:
        replacements.undo()


def _check_some(collectives: int) -> None:
    assert collectives, "a training step started no tensor-parallel collective that can be caught"


class _Finished:
    """The handle of a collective that was left out."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@torch.no_grad()
def _fill_with_own(name: str, arguments: tuple, group: dist.ProcessGroup) -> None:
    """Gives the output what this rank itself contributes to it; an all-reduce has it there already."""
    if name == _ALL_REDUCE:
        return
    output, source = arguments[:2]
    if name == _ALL_GATHER:
        output.view(group.size(), -1).copy_(source.reshape(1, -1))
    else:
        output.view(-1).copy_(source.reshape(group.size(), -1)[group.rank()])


@dataclass(frozen=True, kw_only=True)
class _Collective:
    """A collective to be started again, on tensors of its own."""

    start: Callable[..., dist.Work | None]
    arguments: tuple


class _Recording:
    """The collectives of one step, in order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.collectives: list[_Collective] = []
        self._zeros: dict[tuple, torch.Tensor] = {}

    def run_and_add(self, name: str, original: Callable, *arguments: Any) -> dist.Work | None:
        stand_ins = tuple(self._stand_in(argument) for argument in arguments)
        self.collectives.append(_Collective(start=original, arguments=stand_ins))
        work = original(self._group, *arguments)
        # torch makes the options, which come last, for each call. Its replay shall never block the host.
        arguments[-1].asyncOp = True
        return work

    def replay(self) -> None:
        in_flight: deque[dist.Work | None] = deque()
        for collective in self.collectives:
            if len(in_flight) == _MAX_IN_FLIGHT:
                _wait(in_flight.popleft())
            in_flight.append(collective.start(self._group, *collective.arguments))
        while in_flight:
            _wait(in_flight.popleft())

    def _stand_in(self, argument: Any) -> Any:
        """Zeros for a tensor, since sums of them stay what they are; options are kept."""
        if isinstance(argument, list):
            return [self._stand_in(part) for part in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        # Few tensors serve all, but collectives that are in flight together share none.
        turn = len(self.collectives) % _MAX_IN_FLIGHT
        key = (turn, argument.shape, argument.dtype, argument.device)
        if key not in self._zeros:
            self._zeros[key] = torch.zeros_like(argument, memory_format=torch.contiguous_format)
        return self._zeros[key]


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None where the backend has waited already
        work.wait()
