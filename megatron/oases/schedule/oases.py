"""The Oases order (Li et al., TPDS 2025, section IV): sub-batches, fine-grained recomputation, cross-pass overlap.

While the collective of one sub-batch is in flight, the other sub-batch computes. Recomputation is cut at the
all-reduces, so that none is repeated, and is interleaved with gradients across blocks and layers without a barrier.
"""

from collections.abc import Sequence

from megatron.oases.schedule.operation import Kind, Operation, Schedule


def build_oases_schedule(*, recompute: Sequence[bool], sub_batches: int) -> Schedule:
    """Builds the order for one micro-batch.

    Args:
        recompute: for each block of the chain, whether backward recomputes it.
        sub_batches: number of sub-batches, at least 1 (with 1 nothing is there to hide behind but weight gradients).
    """
    if not recompute:
        raise ValueError("a schedule needs at least one block")
    if sub_batches < 1:
        raise ValueError(f"sub_batches is {sub_batches}, must be at least 1")
    blocks = len(recompute)

    forward: list[Operation] = []
    for block in range(blocks):
        for i in range(sub_batches):
            if block > 0:
                forward.append(Operation(Kind.JOIN, block - 1, i))
            forward.append(Operation(Kind.FORWARD, block, i))
            forward.append(Operation(Kind.REDUCE, block, i))
    forward += [Operation(Kind.JOIN, blocks - 1, i) for i in range(sub_batches)]

    backward: list[Operation] = []
    for block in reversed(range(blocks)):
        for i in range(sub_batches):
            # RECOMPUTE needs no gradient: it stands before the wait for the block above, and hides that collective.
            if recompute[block]:
                backward.append(Operation(Kind.RECOMPUTE, block, i))
            if block + 1 < blocks:
                backward.append(Operation(Kind.NORM_GRAD, block + 1, i))
            backward.append(Operation(Kind.DGRAD, block, i))
            backward.append(Operation(Kind.REDUCE_GRAD, block, i))
            backward.append(Operation(Kind.WGRAD, block, i))
    backward += [Operation(Kind.NORM_GRAD, 0, i) for i in range(sub_batches)]

    return Schedule(
        name="oases",
        blocks=blocks,
        sub_batches=sub_batches,
        recompute=tuple(recompute),
        forward=tuple(forward),
        backward=tuple(backward),
    )
