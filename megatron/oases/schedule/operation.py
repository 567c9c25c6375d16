"""The one type that builder, validator, executor, simulator and trace share.

A GPT, or the pipeline stage of one, is a chain of parts: the embedding, blocks (attention, MLP, attention, …) and the
head. For block `k` and sub-batch `i`

    x[k+1] = x[k] + dropout(all_reduce(core[k](norm[k](x[k]))) + bias[k])

and an operation is one step of computing that, or of its gradient, for one (k, i).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What stands at one place of the chain."""

    EMBEDDING = "embedding"
    BLOCK = "block"  # keeps its autograd graphs for backward
    RECOMPUTED_BLOCK = "recomputed block"  # keeps its input only
    HEAD = "head"  # final norm, output layer, loss

    @property
    def is_block(self) -> bool:
        return self in (Part.BLOCK, Part.RECOMPUTED_BLOCK)


class Kind(Enum):
    """What an operation does. The value is its name in text."""

    FORWARD = "forward"  # norm and core: the part's partial output (the head's is its share of the logits)
    REDUCE = "reduce"  # starts the all-reduce of the partial output
    JOIN = "join"  # waits for it; bias, dropout, residual (the embedding's: positions, dropout)
    LOSS = "loss"  # one cross-entropy over all sub-batches' logits
    LOSS_GRAD = "loss_grad"  # gradient of the loss, to the logits
    RECOMPUTE = "recompute"  # norm and core again from the kept x, without the row-parallel GEMM
    DGRAD = "dgrad"  # gradient through bias-dropout-add and core, to the core's input
    REDUCE_GRAD = "reduce_grad"  # starts the all-reduce of that gradient
    WGRAD = "wgrad"  # weight gradients; nothing in the chain waits for them
    NORM_GRAD = "norm_grad"  # waits for the reduced gradient; through the norm, plus the residual's gradient

    @property
    def is_communication(self) -> bool:
        return self in (Kind.REDUCE, Kind.REDUCE_GRAD)

    @property
    def waits(self) -> bool:
        """Whether it starts by waiting for a collective of its own part and sub-batch."""
        return self in (Kind.JOIN, Kind.NORM_GRAD)


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of one part on one sub-batch.

    `str()` gives `dgrad(3,1)`: place 3 in the chain, sub-batch 1; with a prime for each micro-batch after the first that
    a list deals with. What is done once for all sub-batches has sub-batch 0.
    """

    kind: Kind
    place: int
    sub_batch: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}({self.place},{self.sub_batch})" + "'" * self.micro_batch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of operations.

    Args:
        name: the schedule's name, as `--oases-schedule` takes it.
        chain: the parts, in the order of the forward pass.
        sub_batches: number of sub-batches a micro-batch is cut into, along the batch dimension.
        forward: the forward pass of one micro-batch.
        backward: the backward pass of one micro-batch.
        steady: the backward pass of micro-batch 0 together with the forward pass of micro-batch 1.
    """

    name: str
    chain: tuple[Part, ...]
    sub_batches: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    steady: tuple[Operation, ...]

    def digest(self) -> str:
        """Equal on two ranks only if they run the same operations in the same order."""
        lists = (self.forward, self.backward, self.steady)
        return hashlib.sha256(" | ".join([self.name, *(" ".join(map(str, order)) for order in lists)]).encode()).hexdigest()


def collectives(order: Iterable[Operation]) -> list[Operation]:
    """The collectives of a list, in the order in which every rank starts them."""
    return [operation for operation in order if operation.kind.is_communication]


def forward_operations(chain: tuple[Part, ...], sub_batches: int) -> set[Operation]:
    """All that the forward pass of one micro-batch consists of."""
    operations = set()
    for place, part in enumerate(chain):
        kinds = (Kind.FORWARD,) if part is Part.HEAD else (Kind.FORWARD, Kind.REDUCE, Kind.JOIN)
        operations |= {Operation(kind, place, i) for kind in kinds for i in range(sub_batches)}
        if part is Part.HEAD:
            operations.add(Operation(Kind.LOSS, place))
    return operations


def backward_operations(chain: tuple[Part, ...], sub_batches: int) -> set[Operation]:
    """All that the backward pass of one micro-batch consists of."""
    operations = set()
    for place, part in enumerate(chain):
        if part is Part.EMBEDDING:
            operations.add(Operation(Kind.WGRAD, place))
            continue
        kinds = [Kind.DGRAD, Kind.REDUCE_GRAD, Kind.WGRAD, Kind.NORM_GRAD]
        if part is Part.RECOMPUTED_BLOCK:
            kinds.append(Kind.RECOMPUTE)
        operations |= {Operation(kind, place, i) for kind in kinds for i in range(sub_batches)}
        if part is Part.HEAD:
            operations.add(Operation(Kind.LOSS_GRAD, place))
    return operations


def dependencies(operation: Operation, chain: tuple[Part, ...], sub_batches: int) -> tuple[Operation, ...]:
    """The operations that must come before `operation` on the same rank, within its own pass.

    Only direct ones: what follows from them by transitivity is left out. A pass begins with what it is given: the tokens
    or the previous stage's output, the gradient of the loss or of the stage's output.
    """
    place, part = operation.place, chain[operation.place]

    def at(kind: Kind, place: int, sub_batch: int = operation.sub_batch) -> Operation:
        return Operation(kind, place, sub_batch, operation.micro_batch)

    match operation.kind:
        case Kind.FORWARD:
            return (at(Kind.JOIN, place - 1),) if place > 0 else ()
        case Kind.REDUCE:
            return (at(Kind.FORWARD, place),)
        case Kind.JOIN:
            return (at(Kind.REDUCE, place),)
        case Kind.LOSS:
            return tuple(at(Kind.FORWARD, place, i) for i in range(sub_batches))
        case Kind.LOSS_GRAD | Kind.RECOMPUTE:
            return ()
        case Kind.DGRAD if part is Part.HEAD:
            return (at(Kind.LOSS_GRAD, place, 0),)
        case Kind.DGRAD:
            upstream = (at(Kind.NORM_GRAD, place + 1),) if place + 1 < len(chain) else ()
            return upstream + ((at(Kind.RECOMPUTE, place),) if part is Part.RECOMPUTED_BLOCK else ())
        case Kind.WGRAD if part is Part.EMBEDDING:
            return tuple(at(Kind.NORM_GRAD, place + 1, i) for i in range(sub_batches))
        case Kind.REDUCE_GRAD | Kind.WGRAD:
            return (at(Kind.DGRAD, place),)
        case Kind.NORM_GRAD:
            return (at(Kind.REDUCE_GRAD, place),)
    raise AssertionError(f"no dependencies known for {operation}")
