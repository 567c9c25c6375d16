"""The Oases order (Li et al., TPDS 2025, section IV): sub-batches, fine-grained recomputation, cross-pass overlap.

While the collective of one sub-batch is in flight, the other sub-batch computes. Recomputation is cut at the
all-reduces, so that none is repeated, and is interleaved with gradients across blocks and layers without a barrier.

Beyond the paper: embedding and head are parts of the chain, and with gradient accumulation the backward pass of one
micro-batch, which has more computation than communication, is interleaved with the forward pass of the next, which has less.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron.oases.schedule.ablation import Idea
from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.operation import Kind, Operation, Role
from megatron.oases.schedule.turns import in_turns, up_to_collectives

# What hands a part's gradient on. It waits, so it stands at the beginning of the next part's turn.
_OUT_OF_A_PART = (Kind.NORM_GRAD, Kind.RESHARD_GRAD, Kind.LEAVE)


def build_oases_schedule(layout: Layout, *, without: frozenset[Idea] = frozenset()) -> Schedule:
    """Builds the order for one pipeline stage.

    Args:
        layout: what the order is made for.
        without: ideas to leave out, to measure what they gain. Only COLLECTIVE_FIRST and ENDS are matters of order.
    """
    forward, backward = _forward(layout, without), _backward(layout, without)
    return Schedule(
        name="oases",
        layout=layout,
        forward=tuple(forward),
        backward=tuple(backward),
        steady=tuple(_interleave(backward, forward)),
    )


def _forward(layout: Layout, without: frozenset[Idea]) -> list[Operation]:
    order, last = [], len(layout.chain) - 1
    for place in range(len(layout.chain)):
        # Up to its own last collective; what waits for that stands at the beginning of the next part.
        kinds = [kind for kind in layout.forward_kinds(place) if kind is not Kind.JOIN]
        joins = [(Kind.JOIN, place - 1)] if place > 0 else []
        if Idea.ENDS in without and _touches_end(layout, place):
            order += in_turns(layout, joins)
            joins = []
        order += in_turns(layout, [*joins, *((kind, place) for kind in kinds)])
    if layout.has_head:
        order.append(Operation(Kind.LOSS, last))
    elif Kind.JOIN in layout.forward_kinds(last):
        order += in_turns(layout, [(Kind.JOIN, last)])
    return order


def _backward(layout: Layout, without: frozenset[Idea]) -> list[Operation]:
    last = len(layout.chain) - 1
    first = 1 if layout.has_embedding else 0

    def out_of(place: int) -> list[tuple[Kind, int]]:
        return [(kind, place) for kind in layout.backward_kinds(place) if kind in _OUT_OF_A_PART]

    def regather(place: int) -> list[tuple[Kind, int]]:
        return [(kind, place) for kind in layout.recompute_kinds(place) if kind is not Kind.RECOMPUTE]

    order = [Operation(Kind.LOSS_GRAD, last)] if layout.has_head else []
    order += in_turns(layout, regather(last - 1 if layout.chain[last].role is Role.EXIT else last))
    for place in range(last, first - 1, -1):
        # Recomputation needs no gradient: RECOMPUTE stands before the wait for the part above, and hides that
        # collective; what it gathers is on its way while the part above goes through its core.
        kinds = [(kind, place) for kind in layout.recompute_kinds(place) if kind is Kind.RECOMPUTE]
        if layout.along_sequence:  # the first chunk first, while gradients begin with the last
            order += in_turns(layout, kinds)
            kinds = []
        if place < last:
            if Idea.ENDS in without and layout.chain[place + 1].role is Role.HEAD:
                order += in_turns(layout, out_of(place + 1), last_first=layout.along_sequence)
            else:
                kinds += out_of(place + 1)
        for kind in _backward_kinds(layout, place, without):
            if kind is Kind.DGRAD and place > first:
                kinds += regather(place - 1)
            if kind not in _OUT_OF_A_PART:
                kinds.append((kind, place))
        order += in_turns(layout, kinds, last_first=layout.along_sequence)
    order += in_turns(layout, out_of(first), last_first=layout.along_sequence)
    if layout.has_embedding:
        order.append(Operation(Kind.WGRAD, 0))
    return order


def _backward_kinds(layout: Layout, place: int, without: frozenset[Idea]) -> list[Kind]:
    kinds = list(layout.backward_kinds(place))
    if Idea.COLLECTIVE_FIRST in without and Kind.REDUCE_GRAD in kinds:
        weight_gradients = [kind for kind in kinds if kind.is_weight_gradient]
        kinds = [kind for kind in kinds if not kind.is_weight_gradient]
        at = kinds.index(Kind.REDUCE_GRAD)
        kinds[at:at] = weight_gradients
    return kinds


def _touches_end(layout: Layout, place: int) -> bool:
    return layout.chain[place].role is Role.HEAD or (place > 0 and layout.chain[place - 1].role is Role.EMBEDDING)


def _interleave(backward: Sequence[Operation], forward: Sequence[Operation]) -> Iterator[Operation]:
    """Takes turns between the passes, from one collective to the next. The forward pass is that of micro-batch 1."""

    def runs(order: Sequence[Operation]) -> list[list[Operation]]:
        return up_to_collectives(order, is_communication=lambda operation: operation.kind.is_communication)

    next_forward = [dataclasses.replace(operation, micro_batch=1) for operation in forward]
    for ours, theirs in zip_longest(runs(backward), runs(next_forward), fillvalue=()):
        yield from ours
        yield from theirs
