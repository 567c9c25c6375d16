"""The order in which Megatron itself runs: one sub-batch, and every collective waited for where it was started.

Vanilla runs go through Megatron's own code and autograd, not through the executor. This list says what they do, so that a
simulator can time them. Megatron hides one thing: while the gradient of a column-parallel linear's input is reduced, that
linear's weight gradient is computed. With sequence parallelism it also gathers the linear's input again meanwhile.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.operation import Kind, Operation, Role


def build_megatron_schedule(layout: Layout) -> Schedule:
    """Builds the order for one pipeline stage.

    Args:
        layout: with one sub-batch, and recomputation that repeats collectives.
    """
    if layout.pieces != 1:
        raise ValueError("Megatron decomposes no GEMM")
    return _build("megatron", layout)


def build_wang_schedule(layout: Layout) -> Schedule:
    """Builds the order of Wang et al. (ASPLOS 2023) for one pipeline stage: Megatron's, but that a collective runs beside the
    very GEMM that feeds it, piece by piece: forward and recomputed the row-parallel GEMM, backward the gradient through the
    column-parallel one.

    Args:
        layout: with pieces, one sub-batch, and recomputation that repeats collectives.
    """
    return _build("wang", layout)


def _build(name: str, layout: Layout) -> Schedule:
    if layout.sub_batches != 1 or not layout.repeats_collectives:
        raise ValueError(f"{name} does not cut micro-batches, and repeats the collectives of what it recomputes")
    forward, backward = tuple(_forward(layout)), tuple(_backward(layout))
    next_forward = tuple(Operation(op.kind, op.place, op.sub_batch, micro_batch=1) for op in forward)
    return Schedule(name=name, layout=layout, forward=forward, backward=backward, steady=backward + next_forward)


def _forward(layout: Layout) -> Iterator[Operation]:
    for place in range(len(layout.chain)):
        yield from _by_piece(layout, place, layout.forward_kinds(place))
    if layout.has_head:
        yield Operation(Kind.LOSS, place)


def _backward(layout: Layout) -> Iterator[Operation]:
    last = len(layout.chain) - 1
    if layout.has_head:
        yield Operation(Kind.LOSS_GRAD, last)
    for place in range(last, -1, -1):
        for recomputed in _layer_to_recompute(layout, place):
            yield from _by_piece(layout, recomputed, layout.recompute_kinds(recomputed))
        kinds = list(layout.backward_kinds(place))
        if Kind.ROW_WGRAD in kinds:  # autograd computes it on its way through the block
            kinds.remove(Kind.ROW_WGRAD)
            kinds.insert(kinds.index(Kind.DGRAD) + 1, Kind.ROW_WGRAD)
        yield from _by_piece(layout, place, kinds)
    if layout.has_embedding:
        yield Operation(Kind.WGRAD, 0)


def _by_piece(layout: Layout, place: int, kinds: Iterable[Kind]) -> Iterator[Operation]:
    """The operations of one part. A piece is on its way before the next one is computed."""
    for times, run in groupby(kinds, key=lambda kind: layout.times(kind, place)):
        run = tuple(run)
        for i in range(times):
            for kind in run:
                yield Operation(kind, place, i)


def _layer_to_recompute(layout: Layout, place: int) -> tuple[int, ...]:
    """The blocks that are recomputed when backward reaches `place`: a layer's both, at its last one."""
    if layout.chain[place].role is not Role.MLP:
        return ()
    return tuple(k for k in (place - 1, place) if layout.chain[k].recomputed)
