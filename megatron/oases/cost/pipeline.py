"""Which lists a device runs in an iteration, in which order, and when each begins.

Without pipeline parallelism Megatron's loop runs each micro-batch forward and backward, and the oases schedule may put
a backward pass off until the next forward pass (runtime/interleaving.py). With it, stages run one forward, one backward
(1F1B; Narayanan et al., PipeDream-Flush) and wait for each other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One list that a stage runs.

    Args:
        name: which of the schedule's lists.
        micro_batches: those it deals with, in the order of its operations' `micro_batch`.
        begins: whether it has the iteration's first forward pass.
        ends: whether it has the iteration's last backward pass.
    """

    name: Literal["forward", "backward", "steady"]
    micro_batches: tuple[int, ...]
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """A step and when it runs. The stage is busy sending until `free_ms`."""

    step: Step
    start_ms: float
    end_ms: float
    free_ms: float


def single_stage_steps(micro_batches: int, *, interleaves: bool, last_apart: bool) -> Iterator[Step]:
    """Without pipeline parallelism.

    Args:
        micro_batches: of the iteration.
        interleaves: whether backward passes are put off.
        last_apart: whether the last micro-batch's forward pass may not be interleaved.
    """
    put_off = None
    for m in range(micro_batches):
        if put_off is None:
            yield _forward(m)
        else:
            yield Step(name="steady", micro_batches=(put_off, m))
        to_come = micro_batches - m - 1
        put_off = m if interleaves and to_come > int(last_apart) else None
        if put_off is None:
            yield _backward(m, micro_batches)


def pipeline_steps(micro_batches: int, *, stage: int, stages: int) -> Iterator[Step]:
    """1F1B on one stage."""
    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        yield _forward(m)
    for m in range(micro_batches - ahead):
        yield _forward(ahead + m)
        yield _backward(m, micro_batches)
    for m in range(micro_batches - ahead, micro_batches):
        yield _backward(m, micro_batches)


def run_pipeline(
    steps: Sequence[Sequence[Step]], *, elapsed_ms: Callable[[int, Step], float], send_ms: float
) -> list[list[PlacedStep]]:
    """When each step of each stage runs.

    Args:
        steps: of each stage, in its order.
        elapsed_ms: how long a step of a stage takes by itself.
        send_ms: to send a micro-batch, or its gradient, to the next stage. The sender waits until it is there.
    """
    last = len(steps) - 1
    arrival_ms: dict[tuple[str, int, int], float] = {}  # (list, receiving stage, micro-batch)
    placed: list[list[PlacedStep]] = [[] for _ in steps]
    progressing = True
    while progressing:
        progressing = False
        for stage, own in enumerate(steps):
            while len(placed[stage]) < len(own):
                step = own[len(placed[stage])]
                receives = last > 0 and stage != (0 if step.name == "forward" else last)
                key = (step.name, stage, step.micro_batches[0])
                if receives and key not in arrival_ms:
                    break
                free_ms = placed[stage][-1].free_ms if placed[stage] else 0.0
                start_ms = max(free_ms, arrival_ms[key]) if receives else free_ms
                end_ms = free_ms = start_ms + elapsed_ms(stage, step)
                receiver = stage + (1 if step.name == "forward" else -1)
                if last > 0 and 0 <= receiver <= last:
                    free_ms = arrival_ms[step.name, receiver, step.micro_batches[0]] = end_ms + send_ms
                placed[stage].append(PlacedStep(step=step, start_ms=start_ms, end_ms=end_ms, free_ms=free_ms))
                progressing = True
    assert all(len(done) == len(own) for done, own in zip(placed, steps, strict=True)), "stages wait for each other"
    return placed


def _forward(micro_batch: int) -> Step:
    return Step(name="forward", micro_batches=(micro_batch,), begins=micro_batch == 0)


def _backward(micro_batch: int, micro_batches: int) -> Step:
    return Step(name="backward", micro_batches=(micro_batch,), ends=micro_batch == micro_batches - 1)
