"""The one type that builder, validator, executor, simulator and trace share.

A GPT decoder is a chain of blocks (attention, MLP, attention, …). For block `k` and sub-batch `i`

    x[k+1] = x[k] + dropout(all_reduce(core[k](norm[k](x[k]))) + bias[k])

and an operation is one step of computing that, or of its gradient, for one (k, i).
"""

import hashlib
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an operation does. The value is its short form in text."""

    FORWARD = "forward"  # norm and core: the block's partial output
    REDUCE = "reduce"  # starts the all-reduce of the partial output
    JOIN = "join"  # waits for it; bias, dropout, residual
    RECOMPUTE = "recompute"  # norm and core again from the kept x, without the row-parallel GEMM
    DGRAD = "dgrad"  # gradient through bias-dropout-add and core, to the core's input
    REDUCE_GRAD = "reduce_grad"  # starts the all-reduce of that gradient
    WGRAD = "wgrad"  # the block's weight gradients; nothing in the chain of blocks waits for them
    NORM_GRAD = "norm_grad"  # waits for the reduced gradient; through the norm, plus the residual's gradient

    @property
    def is_communication(self) -> bool:
        return self in (Kind.REDUCE, Kind.REDUCE_GRAD)

    @property
    def waits(self) -> bool:
        """Whether it starts by waiting for a collective of its own block and sub-batch."""
        return self in (Kind.JOIN, Kind.NORM_GRAD)


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of one block on one sub-batch. `str()` gives `dgrad(3,1)`: block 3, sub-batch 1."""

    kind: Kind
    block: int
    sub_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}({self.block},{self.sub_batch})"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of one micro-batch's operations.

    Args:
        name: the schedule's name, as `--oases-schedule` takes it.
        blocks: number of blocks in the chain, two for each transformer layer.
        sub_batches: number of sub-batches a micro-batch is cut into, along the batch dimension.
        recompute: for each block, whether backward recomputes it instead of keeping its activations.
        forward: the operations of the forward pass, in order.
        backward: the operations of the backward pass, in order.
    """

    name: str
    blocks: int
    sub_batches: int
    recompute: tuple[bool, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]

    @property
    def collectives(self) -> tuple[Operation, ...]:
        """The collectives in the order in which every rank starts them."""
        return tuple(op for op in self.forward + self.backward if op.kind.is_communication)

    def digest(self) -> str:
        """Equal on two ranks only if they run the same operations in the same order."""
        text = " ".join([self.name, *map(str, self.forward), "|", *map(str, self.backward)])
        return hashlib.sha256(text.encode()).hexdigest()


def dependencies(operation: Operation, schedule: Schedule) -> tuple[Operation, ...]:
    """The operations that must come before `operation` on the same rank, within its own pass.

    Only direct ones: what follows from them by transitivity is left out. The start of the chain (the embedding's
    output) and its end (the gradient of the last x) are there before the pass begins.
    """
    block, sub_batch = operation.block, operation.sub_batch

    def at(kind: Kind, block_: int = block) -> Operation:
        return Operation(kind, block_, sub_batch)

    match operation.kind:
        case Kind.FORWARD:
            return (at(Kind.JOIN, block - 1),) if block > 0 else ()
        case Kind.REDUCE:
            return (at(Kind.FORWARD),)
        case Kind.JOIN:
            return (at(Kind.REDUCE),)
        case Kind.RECOMPUTE:
            return ()
        case Kind.DGRAD:
            upstream = (at(Kind.NORM_GRAD, block + 1),) if block + 1 < schedule.blocks else ()
            return upstream + ((at(Kind.RECOMPUTE),) if schedule.recompute[block] else ())
        case Kind.REDUCE_GRAD | Kind.WGRAD:
            return (at(Kind.DGRAD),)
        case Kind.NORM_GRAD:
            return (at(Kind.REDUCE_GRAD),)
    raise AssertionError(f"no dependencies known for {operation}")
