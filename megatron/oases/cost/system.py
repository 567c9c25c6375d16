"""What is simulated: vanilla Megatron, or the oases schedule with all of its ideas or without some."""

from dataclasses import dataclass

from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import (
    Filler,
    Idea,
    Layout,
    Schedule,
    build_megatron_schedule,
    build_oases_schedule,
    validate,
)


@dataclass(frozen=True, kw_only=True)
class System:
    """Who orders the operations.

    Args:
        schedule: `vanilla` is Megatron itself.
        without: ideas that are left out.
        host_sees_completion: whether the host can tell that a collective has ended, as with gloo, so that it fills
            waits. With NCCL it cannot.
    """

    schedule: str = "oases"
    without: frozenset[Idea] = frozenset()
    host_sees_completion: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in ("vanilla", "oases"):
            raise ValueError(f"schedule {self.schedule!r} is none of vanilla, oases")
        if self.without and self.is_vanilla:
            raise ValueError("Megatron has none of the ideas that could be left out")

    @property
    def is_vanilla(self) -> bool:
        return self.schedule == "vanilla"

    def sub_batch_sizes(self, workload: Workload) -> tuple[int, ...]:
        """Samples of each sub-batch."""
        return (workload.micro_batch,) if self.is_vanilla else workload.sub_batch_sizes()

    def layout(self, workload: Workload, stage: int) -> Layout:
        return Layout(
            chain=workload.chain(
                stage, keeps_last_layer=not self.is_vanilla and Idea.KEEP_LAST_LAYER not in self.without
            ),
            sub_batches=1 if self.is_vanilla else workload.sub_batches,
            sequence_parallel=workload.sequence_parallel,
            recomputes_row_parallel=self.is_vanilla or Idea.RECOMPUTE_WITHOUT_GEMM in self.without,
            repeats_collectives=self.is_vanilla,
        )

    def build(self, layout: Layout) -> Schedule:
        """The validated lists."""
        if self.is_vanilla:
            schedule = build_megatron_schedule(layout)
        else:
            schedule = build_oases_schedule(layout, without=self.without)
        validate(schedule)
        return schedule

    def filler(self, workload: Workload) -> Filler:
        if self.is_vanilla:
            return Filler()
        return Filler.allowed(
            host_sees_completion=self.host_sees_completion,
            overlap_grad_reduce=workload.overlap_grad_reduce,
            without=self.without,
        )

    def interleaves(self, workload: Workload) -> bool:
        """Whether backward of one micro-batch runs together with forward of the next."""
        return not self.is_vanilla and workload.pipeline == 1 and Idea.INTERLEAVE not in self.without
