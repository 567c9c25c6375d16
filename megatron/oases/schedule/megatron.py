"""The order in which Megatron itself runs: one sub-batch, and every collective waited for where it was started.

Vanilla runs go through Megatron's own code and autograd, not through the executor. This list says what they do, so that a
simulator can time them. Megatron hides one thing: while the gradient of a column-parallel linear's input is reduced, that
linear's weight gradient is computed. With sequence parallelism it also gathers the linear's input again meanwhile.
"""

from collections.abc import Iterator

from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.operation import Kind, Operation, Role


def build_megatron_schedule(layout: Layout) -> Schedule:
    """Builds the order for one pipeline stage.

    Args:
        layout: with one sub-batch, and recomputation that repeats collectives.
    """
    if layout.sub_batches != 1 or not layout.repeats_collectives:
        raise ValueError("Megatron does not cut micro-batches, and repeats the collectives of what it recomputes")
    forward, backward = tuple(_forward(layout)), tuple(_backward(layout))
    next_forward = tuple(Operation(op.kind, op.place, op.sub_batch, micro_batch=1) for op in forward)
    return Schedule(name="megatron", layout=layout, forward=forward, backward=backward, steady=backward + next_forward)


def _forward(layout: Layout) -> Iterator[Operation]:
    for place in range(len(layout.chain)):
        for kind in layout.forward_kinds(place):
            yield Operation(kind, place)
    if layout.has_head:
        yield Operation(Kind.LOSS, place)


def _backward(layout: Layout) -> Iterator[Operation]:
    last = len(layout.chain) - 1
    if layout.has_head:
        yield Operation(Kind.LOSS_GRAD, last)
    for place in range(last, -1, -1):
        for recomputed in _layer_to_recompute(layout, place):
            for kind in layout.recompute_kinds(recomputed):
                yield Operation(kind, recomputed)
        kinds = list(layout.backward_kinds(place))
        if Kind.ROW_WGRAD in kinds:  # autograd computes it on its way through the block
            kinds.remove(Kind.ROW_WGRAD)
            kinds.insert(kinds.index(Kind.REDUCE_GRAD), Kind.ROW_WGRAD)
        for kind in kinds:
            yield Operation(kind, place)
    if layout.has_embedding:
        yield Operation(Kind.WGRAD, 0)


def _layer_to_recompute(layout: Layout, place: int) -> tuple[int, ...]:
    """The blocks that are recomputed when backward reaches `place`: a layer's both, at its last one."""
    if layout.chain[place].role is not Role.MLP:
        return ()
    return tuple(k for k in (place - 1, place) if layout.chain[k].recomputed)
