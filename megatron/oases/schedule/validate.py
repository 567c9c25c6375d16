"""Proves that an order is legal before anything runs on it."""

from collections import Counter
from collections.abc import Iterable

from megatron.oases.schedule.operation import Kind, Operation, Schedule, dependencies

_FORWARD_KINDS = (Kind.FORWARD, Kind.REDUCE, Kind.JOIN)
_BACKWARD_KINDS = (Kind.DGRAD, Kind.REDUCE_GRAD, Kind.WGRAD, Kind.NORM_GRAD)


class ScheduleError(ValueError):
    """An illegal order. The message shows the list with the failing place marked."""


def validate(schedule: Schedule) -> None:
    """Checks that every operation stands exactly once, in its own pass, after all that it depends on.

    Raises:
        ScheduleError: names the first operation at fault and shows its surroundings.
    """
    if len(schedule.recompute) != schedule.blocks:
        raise ScheduleError(f"{schedule.blocks} blocks, but recompute has {len(schedule.recompute)} entries")
    cells = [(block, i) for block in range(schedule.blocks) for i in range(schedule.sub_batches)]
    forward = [Operation(kind, block, i) for kind in _FORWARD_KINDS for block, i in cells]
    backward = [Operation(kind, block, i) for kind in _BACKWARD_KINDS for block, i in cells]
    backward += [Operation(Kind.RECOMPUTE, block, i) for block, i in cells if schedule.recompute[block]]
    _check_pass("forward", schedule.forward, forward, schedule)
    _check_pass("backward", schedule.backward, backward, schedule)


def _check_pass(name: str, order: tuple[Operation, ...], expected: Iterable[Operation], schedule: Schedule) -> None:
    expected_set = set(expected)
    for operation, count in Counter(order).items():
        if operation not in expected_set:
            raise ScheduleError(f"{operation} does not belong in the {name} pass")
        if count > 1:
            raise ScheduleError(f"{operation} stands {count} times in the {name} pass, must stand once")
    if missing := expected_set - set(order):
        raise ScheduleError(f"missing in the {name} pass: {', '.join(sorted(map(str, missing)))}")
    done: set[Operation] = set()
    for place, operation in enumerate(order):
        for needed in dependencies(operation, schedule):
            if needed not in done:
                raise ScheduleError(f"{operation} comes before {needed} in the {name} pass: {_excerpt(order, place)}")
        done.add(operation)


def _excerpt(order: tuple[Operation, ...], place: int, context: int = 4) -> str:
    start = max(0, place - context)
    shown = [f">>{op}<<" if start + i == place else str(op) for i, op in enumerate(order[start : place + context + 1])]
    return " ".join(["…"] * (start > 0) + shown + ["…"] * (place + context + 1 < len(order)))
