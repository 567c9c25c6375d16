"""`--oases-plan` and `--oases-degrees` of a training command: a workload whose blocks have degrees of their own."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.oases.command_line import OneLineParser
from megatron.oases.cost.workload import Workload
from megatron.oases.errors import UsageError
from megatron.oases.plan import Plan, Run, check_plan, parse_degrees, read_plan, refusal


@dataclass(frozen=True, kw_only=True)
class BlockFlags:
    """What a command line says of single blocks.

    Args:
        file: the plan's.
        plan: the plan in it.
        degrees: the short form, where there is no plan.
        schedule: that the command line itself asks for.
        sub_batches: likewise; None where it does not.
        others: all other flags, and what follows from the plan.
    """

    file: Path | None
    plan: Plan | None
    degrees: str | None
    schedule: str
    sub_batches: int | None
    others: tuple[str, ...]

    @classmethod
    def split(cls, flags: Sequence[str]) -> "BlockFlags":
        """Takes them out of a command line.

        Raises:
            UsageError: the plan cannot be read, or there are degrees as well.
        """
        parser = OneLineParser(add_help=False, argument_default=argparse.SUPPRESS)
        parser.add_argument("--oases-plan", type=Path, metavar="FILE")
        parser.add_argument("--oases-degrees", metavar="DEGREES")
        own, others = parser.parse_known_args(flags)
        file, degrees = getattr(own, "oases_plan", None), getattr(own, "oases_degrees", None)
        if file is not None and degrees is not None:
            raise UsageError(f"--oases-plan {file} and --oases-degrees {degrees}: the plan has the degrees; give one")
        parser.add_argument("--oases-schedule", default="vanilla")
        parser.add_argument("--oases-sub-batches", type=int, default=None)
        said = parser.parse_known_args(others)[0]
        plan = read_plan(file) if file is not None else None
        if plan is not None:
            others += ["--oases-schedule", plan.schedule]
        if plan is not None and plan.schedule != "vanilla":
            others += ["--oases-sub-batches", str(plan.sub_batches)]
        return cls(
            file=file,
            plan=plan,
            degrees=degrees,
            schedule=said.oases_schedule,
            sub_batches=said.oases_sub_batches,
            others=tuple(others),
        )

    def applied_to(self, workload: Workload) -> Workload:
        """The workload with their degrees and, if there is a plan, its recomputation.

        Args:
            workload: from the other flags.

        Raises:
            UsageError: they do not fit it.
        """
        if self.plan is not None:
            return self._planned(self.plan, workload)
        if self.degrees is None:
            return workload
        layers = parse_degrees(self.degrees, layers=workload.model.layers)
        for degree in sorted({degree for layer in layers for degree in layer}):
            sizes = {"micro_batch": workload.micro_batch, "sub_batches": workload.sub_batches}
            if error := refusal(degree, workload.tensor, **sizes):
                raise UsageError(f"--oases-degrees {self.degrees}: degree {degree} {error}")
        return replace(workload, degrees=tuple(degree for layer in layers for degree in layer))

    def _planned(self, plan: Plan, workload: Workload) -> Workload:
        run = Run.of(workload, schedule=self.schedule, sub_batches=self.sub_batches)
        check_plan(plan, run, file=self.file)
        recomputed = tuple(block.recomputed for block in plan.blocks)
        if workload.recompute != "none" and not all(recomputed):
            raise UsageError(
                f"--recompute-granularity full: {self.file} recomputes {sum(recomputed)} of {len(recomputed)} blocks, "
                "and says which: leave it out"
            )
        degrees = tuple(block.degree for block in plan.blocks)
        recompute = "full" if all(recomputed) else "none"
        return replace(workload, degrees=degrees, recomputed=recomputed, recompute=recompute)
