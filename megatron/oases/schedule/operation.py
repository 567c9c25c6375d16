"""The one type that builder, validator, executor, simulator and trace share.

A GPT, or the pipeline stage of one, is a chain of parts: the embedding, blocks (attention, MLP, attention, …) and the
head. For block `k` and sub-batch `i`

    x[k+1] = x[k] + dropout(all_reduce(core[k](norm[k](x[k]))) + bias[k])

and an operation is one step of computing that, or of its gradient, for one (k, i).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a part of the model is."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    HEAD = "head"  # final norm, output layer, loss
    EXIT = "exit"  # end of a pipeline stage whose last block has sub-groups: hands whole micro-batches on


@dataclass(frozen=True, slots=True)
class Part:
    """What stands at one place of the chain.

    Args:
        role: what it is.
        recomputed: whether it keeps its input only, and backward computes it again. Otherwise its graphs are kept.
        sub_groups: into how many sub-groups the tensor-parallel group falls for this block. Each has the whole block, on
            as many times fewer ranks, and an equal share of every sub-batch's samples.
    """

    role: Role
    recomputed: bool = False
    sub_groups: int = 1

    def __post_init__(self) -> None:
        if self.recomputed and not self.is_block:
            raise ValueError(f"the {self.role.value} is never recomputed")
        if self.sub_groups < 1 or (self.sub_groups > 1 and not self.is_block):
            raise ValueError(f"the {self.role.value} has {self.sub_groups} sub-groups")

    @property
    def is_block(self) -> bool:
        return self.role in (Role.ATTENTION, Role.MLP)


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
    WGRAD = "wgrad"  # weight gradient of the column-parallel linear (the embedding's, the head's: of its only weight)
    ROW_WGRAD = "row_wgrad"  # that of the row-parallel linear. Nothing in the chain waits for either
    NORM_GRAD = "norm_grad"  # waits for the reduced gradient; through the norm, plus the residual's gradient

    # With sequence parallelism only. There FORWARD, RECOMPUTE and DGRAD wait for what is gathered, and begin behind it.
    NORM = "norm"  # the norm, on this rank's part of the sequence
    GATHER = "gather"  # starts the all-gather of its output
    RENORM = "renorm"  # the norm again, from the kept x
    REGATHER = "regather"  # starts the all-gather of its output, for RECOMPUTE and the weight gradient
    JOIN_GRAD = "join_grad"  # gradient through bias-dropout-add
    GATHER_GRAD = "gather_grad"  # starts the all-gather of it

    # Only where the number of sub-groups changes. x, or its gradient, is sliced where there become more (without sequence
    # parallelism nothing is sent then), gathered where there become fewer.
    RESHARD = "reshard"  # starts sending x to where this part needs it
    ENTER = "enter"  # waits for it, takes this sub-group's share
    RESHARD_GRAD = "reshard_grad"  # starts sending the gradient of x back to where the part before needs it
    LEAVE = "leave"  # waits for it, takes the share of the sub-group of the part before

    # Only where a GEMM and the collective behind it are decomposed into pieces, along the sequence. There FORWARD and
    # RECOMPUTE are without the row-parallel GEMM, DGRAD is without the last one.
    ROW = "row"  # a piece of the row-parallel GEMM
    REROW = "rerow"  # the same in recomputation
    COLUMN_GRAD = "column_grad"  # a piece of the gradient of the column-parallel linear's input

    # Only where a whole layer is recomputed, with its collectives, as Megatron does.
    REREDUCE = "rereduce"  # starts the all-reduce (reduce-scatter) of the recomputed output
    REJOIN = "rejoin"  # waits for it: the next block's x again
    RERESHARD = "rereshard"  # starts sending that x to where the next block needs it
    REENTER = "reenter"  # waits for it
    GATHER_INPUT = "gather_input"  # with sequence parallelism: starts gathering the core's input, for WGRAD

    @property
    def is_communication(self) -> bool:
        return self in AWAITS.values()

    @property
    def is_weight_gradient(self) -> bool:
        return self in (Kind.WGRAD, Kind.ROW_WGRAD)


# What each computing operation waits for, if it was started.
AWAITS = {
    Kind.JOIN: Kind.REDUCE,
    Kind.NORM_GRAD: Kind.REDUCE_GRAD,
    Kind.FORWARD: Kind.GATHER,
    Kind.RECOMPUTE: Kind.REGATHER,
    Kind.DGRAD: Kind.GATHER_GRAD,
    Kind.ENTER: Kind.RESHARD,
    Kind.LEAVE: Kind.RESHARD_GRAD,
    Kind.REJOIN: Kind.REREDUCE,
    Kind.REENTER: Kind.RERESHARD,
    Kind.WGRAD: Kind.GATHER_INPUT,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of one part on one sub-batch.

    `str()` gives `dgrad(3,1)`: place 3 in the chain, sub-batch 1; with a prime for each micro-batch after the first that
    a list deals with. What is done once for all sub-batches has sub-batch 0. Pieces of the only sub-batch are counted instead.
    """

    kind: Kind
    place: int
    sub_batch: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}({self.place},{self.sub_batch})" + "'" * self.micro_batch


def collectives(order: Iterable[Operation]) -> list[Operation]:
    """The collectives of a list, in the order in which every rank starts them."""
    return [operation for operation in order if operation.kind.is_communication]
