"""The one type that builder, validator, executor, simulator and trace share.

A GPT, or the pipeline stage of one, is a chain of parts: the embedding, blocks (attention, MLP, attention, …) and the
head. For block `k` and sub-batch `i`

    x[k+1] = x[k] + dropout(all_reduce(core[k](norm[k](x[k]))) + bias[k])

and an operation is one step of computing that, or of its gradient, for one (k, i).
"""

import dataclasses
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
    REDUCE = "reduce"  # starts the all-reduce (reduce-scatter) of the partial output
    JOIN = "join"  # waits for it; bias, dropout, residual (the embedding's: positions, dropout)
    LOSS = "loss"  # one cross-entropy over all sub-batches' logits
    LOSS_GRAD = "loss_grad"  # gradient of the loss, to the logits
    RECOMPUTE = "recompute"  # norm and core again from the kept x, without the row-parallel GEMM
    DGRAD = "dgrad"  # gradient through bias-dropout-add and core, to the core's input
    REDUCE_GRAD = "reduce_grad"  # starts the all-reduce (reduce-scatter) of that gradient
    WGRAD = "wgrad"  # weight gradients; nothing in the chain waits for them
    NORM_GRAD = "norm_grad"  # waits for the reduced gradient; through the norm, plus the residual's gradient

    # With sequence parallelism only. There FORWARD, RECOMPUTE and DGRAD wait for what is gathered, and begin behind it.
    NORM = "norm"  # the norm, on this rank's part of the sequence
    GATHER = "gather"  # starts the all-gather of its output
    RENORM = "renorm"  # the norm again, from the kept x
    REGATHER = "regather"  # starts the all-gather of its output, for RECOMPUTE and the weight gradient
    JOIN_GRAD = "join_grad"  # gradient through bias-dropout-add
    GATHER_GRAD = "gather_grad"  # starts the all-gather of it

    @property
    def is_communication(self) -> bool:
        return self in AWAITS.values()


# What each computing operation waits for, if it was started.
AWAITS = {
    Kind.JOIN: Kind.REDUCE,
    Kind.NORM_GRAD: Kind.REDUCE_GRAD,
    Kind.FORWARD: Kind.GATHER,
    Kind.RECOMPUTE: Kind.REGATHER,
    Kind.DGRAD: Kind.GATHER_GRAD,
}


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
class Layout:
    """What an order is made for.

    Args:
        chain: the parts of the pipeline stage, in the order of the forward pass.
        sub_batches: number of sub-batches a micro-batch is cut into. With 1 nothing is there to hide a collective behind
            but weight gradients.
        along_sequence: whether the cuts are along the sequence instead of the batch. Then a chunk needs the keys and
            values of the chunks before it, and in backward the gradients from the chunks behind it.
        sequence_parallel: whether what lies between blocks is split over the ranks along the sequence.
    """

    chain: tuple[Part, ...]
    sub_batches: int
    along_sequence: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not any(part.is_block for part in self.chain):
            raise ValueError("a schedule needs at least one block")
        if self.sub_batches < 1:
            raise ValueError(f"sub_batches is {self.sub_batches}, must be at least 1")
        for place, part in enumerate(self.chain):
            if part is Part.EMBEDDING and place != 0 or part is Part.HEAD and place != len(self.chain) - 1:
                raise ValueError(f"the {part.value} stands at place {place} of {len(self.chain)}")
        if self.along_sequence and self.sequence_parallel:
            raise ValueError("the sequence is split over the ranks already: no sub-batches along it")

    def forward_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations of a part in the forward pass, in order, for each sub-batch."""
        gather = (Kind.NORM, Kind.GATHER) if self._gathers(place) else ()
        ends = () if self.chain[place] is Part.HEAD else (Kind.REDUCE, Kind.JOIN)
        return gather + (Kind.FORWARD,) + ends

    def recompute_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations that recompute a part, in order, for each sub-batch."""
        if self.chain[place] is not Part.RECOMPUTED_BLOCK:
            return ()
        gather = (Kind.RENORM, Kind.REGATHER) if self._gathers(place) else ()
        return gather + (Kind.RECOMPUTE,)

    def backward_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations of a part in the backward pass, in order, for each sub-batch."""
        if self.chain[place] is Part.EMBEDDING:
            return ()
        gathers = self._gathers(place) and self.chain[place] is not Part.HEAD
        gather = (Kind.JOIN_GRAD, Kind.GATHER_GRAD) if gathers else ()
        return gather + (Kind.DGRAD, Kind.REDUCE_GRAD, Kind.WGRAD, Kind.NORM_GRAD)

    def _gathers(self, place: int) -> bool:
        return self.sequence_parallel and self.chain[place] is not Part.EMBEDDING

    def forward_operations(self) -> set[Operation]:
        """All that the forward pass of one micro-batch consists of."""
        joint = {Operation(Kind.LOSS, place) for place, part in enumerate(self.chain) if part is Part.HEAD}
        return joint | self._each(self.forward_kinds)

    def backward_operations(self) -> set[Operation]:
        """All that the backward pass of one micro-batch consists of."""
        joint = {Operation(Kind.LOSS_GRAD, place) for place, part in enumerate(self.chain) if part is Part.HEAD}
        joint |= {Operation(Kind.WGRAD, place) for place, part in enumerate(self.chain) if part is Part.EMBEDDING}
        return joint | self._each(self.recompute_kinds) | self._each(self.backward_kinds)

    def _each(self, kinds) -> set[Operation]:
        return {
            Operation(kind, place, i)
            for place in range(len(self.chain))
            for kind in kinds(place)
            for i in range(self.sub_batches)
        }

    def dependencies(self, operation: Operation) -> tuple[Operation, ...]:
        """The operations that must come before `operation` on the same rank, within its own pass.

        Only direct ones: what follows from them by transitivity is left out. A pass begins with what it is given: the
        tokens or the previous stage's output, the gradient of the loss or of the stage's output.
        """
        return self._own_dependencies(operation) + self._dependencies_on_chunks(operation)

    def _dependencies_on_chunks(self, operation: Operation) -> tuple[Operation, ...]:
        if not self.along_sequence or not self.chain[operation.place].is_block:
            return ()
        step = {Kind.FORWARD: -1, Kind.RECOMPUTE: -1, Kind.DGRAD: 1}.get(operation.kind)
        if step is None or operation.sub_batch + step not in range(self.sub_batches):
            return ()
        return (dataclasses.replace(operation, sub_batch=operation.sub_batch + step),)

    def _own_dependencies(self, operation: Operation) -> tuple[Operation, ...]:
        place, part = operation.place, self.chain[operation.place]

        def at(kind: Kind, place: int = place, sub_batch: int = operation.sub_batch) -> Operation:
            return Operation(kind, place, sub_batch, operation.micro_batch)

        def of_all(kind: Kind, place: int) -> tuple[Operation, ...]:
            return tuple(at(kind, place, i) for i in range(self.sub_batches))

        def upstream() -> tuple[Operation, ...]:
            if part is Part.HEAD:
                return (at(Kind.LOSS_GRAD, place, 0),)
            return (at(Kind.NORM_GRAD, place + 1),) if place + 1 < len(self.chain) else ()

        match operation.kind:
            case kind if kind is self.forward_kinds(place)[0]:
                return (at(Kind.JOIN, place - 1),) if place > 0 else ()
            case Kind.GATHER:
                return (at(Kind.NORM),)
            case Kind.FORWARD:
                return (at(Kind.GATHER),)
            case Kind.REDUCE:
                return (at(Kind.FORWARD),)
            case Kind.JOIN:
                return (at(Kind.REDUCE),)
            case Kind.LOSS:
                return of_all(Kind.FORWARD, place)
            case Kind.LOSS_GRAD | Kind.RENORM:
                return ()
            case Kind.REGATHER:
                return (at(Kind.RENORM),)
            case Kind.RECOMPUTE:
                return (at(Kind.REGATHER),) if self._gathers(place) else ()
            case Kind.JOIN_GRAD:
                return upstream()
            case Kind.GATHER_GRAD:
                return (at(Kind.JOIN_GRAD),)
            case Kind.DGRAD:
                gathers = Kind.GATHER_GRAD in self.backward_kinds(place)
                recomputed = (at(Kind.RECOMPUTE),) if part is Part.RECOMPUTED_BLOCK else ()
                return recomputed + ((at(Kind.GATHER_GRAD),) if gathers else upstream())
            case Kind.WGRAD if part is Part.EMBEDDING:
                return of_all(Kind.NORM_GRAD, place + 1)
            case Kind.REDUCE_GRAD | Kind.WGRAD:
                return (at(Kind.DGRAD),)
            case Kind.NORM_GRAD:
                return (at(Kind.REDUCE_GRAD),)
        raise AssertionError(f"no dependencies known for {operation}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of operations.

    Args:
        name: the schedule's name, as `--oases-schedule` takes it.
        layout: what the order is made for.
        forward: the forward pass of one micro-batch.
        backward: the backward pass of one micro-batch.
        steady: the backward pass of micro-batch 0 together with the forward pass of micro-batch 1.
    """

    name: str
    layout: Layout
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    steady: tuple[Operation, ...]

    def digest(self) -> str:
        """Equal on two ranks only if they run the same operations in the same order."""
        lists = (" ".join(map(str, order)) for order in (self.forward, self.backward, self.steady))
        return hashlib.sha256(" | ".join([self.name, *lists]).encode()).hexdigest()


def collectives(order: Iterable[Operation]) -> list[Operation]:
    """The collectives of a list, in the order in which every rank starts them."""
    return [operation for operation in order if operation.kind.is_communication]
