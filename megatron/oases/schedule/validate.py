"""Proves that an order is legal before anything runs on it."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.operation import Operation


class ScheduleError(ValueError):
    """An illegal order. The message shows the list with the failing place marked."""


def validate(schedule: Schedule) -> None:
    """Checks that every list has each of its operations once, after all that it depends on.

    Raises:
        ScheduleError: names the first operation at fault and shows its surroundings.
    """
    layout = schedule.layout
    forward, backward = layout.forward_operations(), layout.backward_operations()
    next_forward = {dataclasses.replace(operation, micro_batch=1) for operation in forward}
    _check("forward", schedule.forward, forward, layout)
    _check("backward", schedule.backward, backward, layout)
    _check("steady", schedule.steady, backward | next_forward, layout)


def _check(name: str, order: Sequence[Operation], expected: set[Operation], layout: Layout) -> None:
    for operation, count in Counter(order).items():
        if operation not in expected:
            raise ScheduleError(f"{operation} does not belong in the {name} list")
        if count > 1:
            raise ScheduleError(f"{operation} stands {count} times in the {name} list, must stand once")
    if missing := expected - set(order):
        raise ScheduleError(f"missing in the {name} list: {', '.join(sorted(map(str, missing)))}")
    done: set[Operation] = set()
    for place, operation in enumerate(order):
        for needed in layout.dependencies(operation):
            if needed not in done:
                raise ScheduleError(f"{operation} comes before {needed} in the {name} list: {_excerpt(order, place)}")
        done.add(operation)


def _excerpt(order: Sequence[Operation], place: int, context: int = 4) -> str:
    start = max(0, place - context)
    shown = [f">>{op}<<" if start + i == place else str(op) for i, op in enumerate(order[start : place + context + 1])]
    return " ".join(["…"] * (start > 0) + shown + ["…"] * (place + context + 1 < len(order)))
