"""What a simulator asks of a cost model, whether that knows a profile or only a cluster file."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from megatron.oases.schedule import Kind, Part


class Collective(Enum):
    """What a process group can be asked for. The value is its name in files."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"  # from one pipeline stage to the next


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, by where its ranks lie: `size` of them, each `stride` ranks from the next.

    All groups of the same shape communicate at the same time, and so share the links that they have in common.
    """

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group of {self}")

    def __str__(self) -> str:
        return f"{self.size} ranks, {self.stride} apart"

    def ranks(self, world_size: int) -> list[list[int]]:
        """The ranks of each group of this shape. Together they hold the whole world, unless there is room for one group
        and not for two: as for those of the first and the last of three pipeline stages.

        Raises:
            ValueError: groups of this shape do not fit.
        """
        block, reach = self.size * self.stride, (self.size - 1) * self.stride
        if world_size % block and not reach < world_size < block:
            raise ValueError(f"{world_size} ranks are not groups of {self}")
        return [
            list(range(first, first + reach + 1, self.stride))
            for start in range(0, world_size, block)
            for first in range(start, min(start + self.stride, world_size - reach))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much slower (factors of at least 1) each gets while the other runs."""

    compute: float = 1.0
    communication: float = 1.0


class CostModel(Protocol):
    """Times on one device of one cluster, for one model. What it cannot know is an error, never a guess."""

    def compute_ms(self, kind: Kind, part: Part, *, degree: int, samples: int, pieces: int = 1) -> float:
        """One computing operation of one part, without waiting for anything.

        Args:
            kind: the operation, as `Layout.computes_as` has it. RECOMPUTE is without the row-parallel GEMM. LOSS,
                LOSS_GRAD and the embedding's WGRAD are of all sub-batches together.
            part: what it is, and whether its graphs are kept or it is recomputed, which takes different times.
            degree: TP degree.
            samples: number of samples `b` in [s, b, h].
            pieces: into how many a GEMM is cut, of which one is wanted; only of ROW and COLUMN_GRAD.
        """

    def collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        """One collective alone on its links.

        Args:
            collective: which.
            group: on which ranks.
            size_bytes: of the whole tensor: what each rank puts into an all-reduce or a reduce-scatter, what each rank gets
                out of an all-gather, what one rank sends.
        """

    def optimizer_ms(self, parameters: int) -> float:
        """Clipping and one Adam step on the parameters that one device updates."""

    def iteration_overhead_ms(self, micro_batches: int) -> float:
        """What an iteration takes beside computation and collectives: data, logging, the loop itself."""

    def contention(self, group: Group) -> Contention:
        """What happens while computation and a collective of `group` run at the same time."""
