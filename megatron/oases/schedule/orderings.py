"""The systems' ways to order an iteration, by name: the one list of them, for whoever runs or predicts one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from megatron.oases.schedule.ablation import Idea
from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.megatron import build_megatron_schedule, build_wang_schedule
from megatron.oases.schedule.merak import build_domino_schedule, build_merak_schedule
from megatron.oases.schedule.oases import build_oases_schedule
from megatron.oases.schedule.operation import Part
from megatron.oases.schedule.validate import validate


class Cut(Enum):
    """What a system cuts to have something to overlap."""

    NOTHING = "nothing"
    MICRO_BATCHES = "micro-batches"  # into sub-batches
    GEMMS = "GEMMs"  # into pieces, with the collective behind them


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """One of them.

    Args:
        cut: what is cut.
        repeats_collectives: whether recomputation runs whole layers again, collectives included. If not, it is fine-grained.
        has_ideas: whether it is made of ideas that can be left out.
    """

    builder: Callable[..., Schedule]
    cut: Cut
    repeats_collectives: bool
    has_ideas: bool = False

    def layout(
        self,
        chain: tuple[Part, ...],
        *,
        sub_batches: int,
        pieces: int,
        sequence_parallel: bool,
        along_sequence: bool = False,
        without: frozenset[Idea] = frozenset(),
    ) -> Layout:
        """What its lists are made for.

        Args:
            chain: the stage's parts.
            sub_batches: into how many a micro-batch is cut, by a system that does.
            pieces: into how many a GEMM is cut, by a system that does.
            sequence_parallel: see `Layout`.
            along_sequence: see `Layout`.
            without: ideas that are left out.
        """
        return Layout(
            chain=chain,
            sub_batches=sub_batches if self.cut is Cut.MICRO_BATCHES else 1,
            pieces=pieces if self.cut is Cut.GEMMS else 1,
            along_sequence=along_sequence,
            sequence_parallel=sequence_parallel,
            recomputes_row_parallel=self.repeats_collectives or Idea.RECOMPUTE_WITHOUT_GEMM in without,
            repeats_collectives=self.repeats_collectives,
        )

    def build(self, layout: Layout, *, without: frozenset[Idea] = frozenset()) -> Schedule:
        """The validated lists."""
        schedule = self.builder(layout, without=without) if self.has_ideas else self.builder(layout)
        validate(schedule)
        return schedule


ORDERINGS = {
    "vanilla": Ordering(builder=build_megatron_schedule, cut=Cut.NOTHING, repeats_collectives=True),
    "wang": Ordering(builder=build_wang_schedule, cut=Cut.GEMMS, repeats_collectives=True),
    "merak": Ordering(builder=build_merak_schedule, cut=Cut.MICRO_BATCHES, repeats_collectives=True),
    "domino": Ordering(builder=build_domino_schedule, cut=Cut.MICRO_BATCHES, repeats_collectives=True),
    "oases": Ordering(
        builder=build_oases_schedule, cut=Cut.MICRO_BATCHES, repeats_collectives=False, has_ideas=True
    ),
}
