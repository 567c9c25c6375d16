"""Sub-batches that overlap inside each pass: Merak's order (Lai et al., TPDS 2023) and DeepSpeed-Domino's.

Both cut a micro-batch in two and compute one half while the other communicates, in the forward pass, in the recomputation
of a layer and in its backward pass, but not across: a layer is recomputed as a whole, with all of its collectives, when
its gradient has come, and its backward pass begins when that is through.
"""

from collections.abc import Iterator

from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.operation import Kind, Operation, Role
from megatron.oases.schedule.turns import in_turns


def build_merak_schedule(layout: Layout) -> Schedule:
    """Builds Merak's order for one pipeline stage. Weight gradients are computed where Megatron computes them.

    Args:
        layout: with recomputation that repeats collectives.
    """
    return _build("merak", layout, row_wgrad_first=True)


def build_domino_schedule(layout: Layout) -> Schedule:
    """Builds Domino's order for one pipeline stage: both weight gradients of a block stand behind its collective.

    Args:
        layout: with recomputation that repeats collectives.
    """
    return _build("domino", layout, row_wgrad_first=False)


def _build(name: str, layout: Layout, *, row_wgrad_first: bool) -> Schedule:
    if not layout.repeats_collectives:
        raise ValueError(f"{name} repeats the collectives of what it recomputes")
    forward = tuple(_forward(layout))
    backward = tuple(_backward(layout, row_wgrad_first))
    next_forward = tuple(Operation(op.kind, op.place, op.sub_batch, micro_batch=1) for op in forward)
    return Schedule(name=name, layout=layout, forward=forward, backward=backward, steady=backward + next_forward)


def _forward(layout: Layout) -> Iterator[Operation]:
    kinds = [(kind, place) for place in range(len(layout.chain)) for kind in layout.forward_kinds(place)]
    yield from in_turns(layout, kinds)
    if layout.has_head:
        yield Operation(Kind.LOSS, len(layout.chain) - 1)


def _backward(layout: Layout, row_wgrad_first: bool) -> Iterator[Operation]:
    last = len(layout.chain) - 1
    if layout.has_head:
        yield Operation(Kind.LOSS_GRAD, last)
    gradients: list[tuple[Kind, int]] = []
    for place in range(last, -1, -1):
        if recomputed := _layer_to_recompute(layout, place):
            yield from in_turns(layout, gradients)
            gradients = []
            yield from in_turns(layout, recomputed)
        kinds = list(layout.backward_kinds(place))
        if row_wgrad_first and Kind.ROW_WGRAD in kinds:
            kinds.remove(Kind.ROW_WGRAD)
            kinds.insert(kinds.index(Kind.REDUCE_GRAD), Kind.ROW_WGRAD)
        gradients += [(kind, place) for kind in kinds]
    yield from in_turns(layout, gradients)
    if layout.has_embedding:
        yield Operation(Kind.WGRAD, 0)


def _layer_to_recompute(layout: Layout, place: int) -> list[tuple[Kind, int]]:
    """What is recomputed when backward reaches `place`: at a layer's last block, all of it that keeps no graphs."""
    if layout.chain[place].role is not Role.MLP:
        return []
    return [(kind, k) for k in (place - 1, place) for kind in layout.recompute_kinds(k)]
