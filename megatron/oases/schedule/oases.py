"""The Oases order (Li et al., TPDS 2025, section IV): sub-batches, fine-grained recomputation, cross-pass overlap.

While the collective of one sub-batch is in flight, the other sub-batch computes. Recomputation is cut at the
all-reduces, so that none is repeated, and is interleaved with gradients across blocks and layers without a barrier.

Beyond the paper: embedding and head are parts of the chain, and with gradient accumulation the backward pass of one
micro-batch, which has more computation than communication, is interleaved with the forward pass of the next, which has less.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron.oases.schedule.operation import Kind, Operation, Part, Schedule


def build_oases_schedule(*, chain: Sequence[Part], sub_batches: int) -> Schedule:
    """Builds the order for a chain of parts.

    Args:
        chain: the parts of the pipeline stage.
        sub_batches: number of sub-batches, at least 1 (with 1 nothing is there to hide behind but weight gradients).
    """
    if not any(part.is_block for part in chain):
        raise ValueError("a schedule needs at least one block")
    if sub_batches < 1:
        raise ValueError(f"sub_batches is {sub_batches}, must be at least 1")
    chain = tuple(chain)
    forward, backward = _forward(chain, sub_batches), _backward(chain, sub_batches)
    return Schedule(
        name="oases",
        chain=chain,
        sub_batches=sub_batches,
        forward=tuple(forward),
        backward=tuple(backward),
        steady=tuple(_interleave(backward, forward)),
    )


def _forward(chain: tuple[Part, ...], sub_batches: int) -> list[Operation]:
    order = []
    for place, part in enumerate(chain):
        for i in range(sub_batches):
            if place > 0:
                order.append(Operation(Kind.JOIN, place - 1, i))
            order.append(Operation(Kind.FORWARD, place, i))
            if part is not Part.HEAD:
                order.append(Operation(Kind.REDUCE, place, i))
    last = len(chain) - 1
    if chain[last] is Part.HEAD:
        order.append(Operation(Kind.LOSS, last))
    else:
        order += [Operation(Kind.JOIN, last, i) for i in range(sub_batches)]
    return order


def _backward(chain: tuple[Part, ...], sub_batches: int) -> list[Operation]:
    last = len(chain) - 1
    order = [Operation(Kind.LOSS_GRAD, last)] if chain[last] is Part.HEAD else []
    first = 1 if chain[0] is Part.EMBEDDING else 0
    for place in range(last, first - 1, -1):
        for i in range(sub_batches):
            # RECOMPUTE needs no gradient: it stands before the wait for the part above, and hides that collective.
            if chain[place] is Part.RECOMPUTED_BLOCK:
                order.append(Operation(Kind.RECOMPUTE, place, i))
            if place < last:
                order.append(Operation(Kind.NORM_GRAD, place + 1, i))
            order.append(Operation(Kind.DGRAD, place, i))
            order.append(Operation(Kind.REDUCE_GRAD, place, i))
            order.append(Operation(Kind.WGRAD, place, i))
    order += [Operation(Kind.NORM_GRAD, first, i) for i in range(sub_batches)]
    if chain[0] is Part.EMBEDDING:
        order.append(Operation(Kind.WGRAD, 0))
    return order


def _interleave(backward: Sequence[Operation], forward: Sequence[Operation]) -> Iterator[Operation]:
    """Takes turns between the passes, from one collective to the next. The forward pass is that of micro-batch 1."""
    next_forward = [dataclasses.replace(operation, micro_batch=1) for operation in forward]
    for ours, theirs in zip_longest(_up_to_collectives(backward), _up_to_collectives(next_forward), fillvalue=()):
        yield from ours
        yield from theirs


def _up_to_collectives(order: Sequence[Operation]) -> Iterator[list[Operation]]:
    run = []
    for operation in order:
        run.append(operation)
        if operation.kind.is_communication:
            yield run
            run = []
    yield run
