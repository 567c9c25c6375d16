"""What is simulated: one of the orderings, with all of its ideas or without some."""

from dataclasses import dataclass

from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import ORDERINGS, Cut, Filler, Idea, Layout, Ordering, Schedule


@dataclass(frozen=True, kw_only=True)
class System:
    """Who orders the operations.

    Args:
        schedule: a name in `ORDERINGS`; `vanilla` is Megatron itself.
        without: ideas that are left out.
        host_sees_completion: whether the host can tell that a collective has ended, as with gloo, so that it fills
            waits. With NCCL it cannot.
    """

    schedule: str = "oases"
    without: frozenset[Idea] = frozenset()
    host_sees_completion: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in ORDERINGS:
            raise ValueError(f"schedule {self.schedule!r} is none of {', '.join(ORDERINGS)}")
        if self.without and not self.ordering.has_ideas:
            raise ValueError(f"{self.schedule} has none of the ideas that could be left out")

    @property
    def ordering(self) -> Ordering:
        return ORDERINGS[self.schedule]

    @property
    def is_vanilla(self) -> bool:
        return self.schedule == "vanilla"

    def sub_batch_sizes(self, workload: Workload) -> tuple[int, ...]:
        """Samples of each sub-batch."""
        cuts = self.ordering.cut is Cut.MICRO_BATCHES
        return workload.sub_batch_sizes() if cuts else (workload.micro_batch,)

    def layout(self, workload: Workload, stage: int) -> Layout:
        keeps_last_layer = self.ordering.has_ideas and Idea.KEEP_LAST_LAYER not in self.without
        return self.ordering.layout(
            workload.chain(stage, keeps_last_layer=keeps_last_layer),
            sub_batches=workload.sub_batches,
            pieces=workload.pieces,
            sequence_parallel=workload.sequence_parallel,
            without=self.without,
        )

    def build(self, layout: Layout) -> Schedule:
        """The validated lists."""
        return self.ordering.build(layout, without=self.without)

    def filler(self, workload: Workload) -> Filler:
        if not self.ordering.has_ideas:
            return Filler()
        return Filler.allowed(
            host_sees_completion=self.host_sees_completion,
            overlap_grad_reduce=workload.overlap_grad_reduce,
            without=self.without,
        )

    def interleaves(self, workload: Workload) -> bool:
        """Whether backward of one micro-batch runs together with forward of the next."""
        return self.ordering.has_ideas and workload.pipeline == 1 and Idea.INTERLEAVE not in self.without
