"""Sub-batches that take turns: what one computes hides what another has on its way."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from megatron.oases.schedule.layout import Layout
from megatron.oases.schedule.operation import Kind, Operation


def in_turns(
    layout: Layout, kinds: Iterable[tuple[Kind, int]], *, last_first: bool = False
) -> Iterator[Operation]:
    """The same operations for every sub-batch, which take turns whenever one has started a collective.

    Weight gradients stay right behind the collective that they hide.
    """
    runs = up_to_collectives(kinds, is_communication=lambda entry: entry[0].is_communication)
    for run, following in pairwise(runs):
        while following and following[0][0].is_weight_gradient:
            run.append(following.pop(0))
    sub_batches = range(layout.sub_batches)
    for run in runs:
        for i in reversed(sub_batches) if last_first else sub_batches:
            for kind, place in run:
                yield Operation(kind, place, i)


def up_to_collectives(entries: Iterable, *, is_communication: Callable[..., bool]) -> list[list]:
    """Cuts a list behind each collective."""
    runs = [[]]
    for entry in entries:
        runs[-1].append(entry)
        if is_communication(entry):
            runs.append([])
    return [run for run in runs if run]
