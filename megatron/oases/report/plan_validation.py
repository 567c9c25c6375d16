"""The planner's choice against the plans that it did not choose: every uniform degree, and plans drawn at random.

All of them run on the emulated cluster, two servers of two devices, from plan files, in alternation. Costs are from a
profile taken on that cluster.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from megatron.oases.cost.prediction import FlagParser, predict
from megatron.oases.cost.sources import CostSource
from megatron.oases.plan import BlockPlan, LayerPlan, Plan, legal_degrees, write_plan
from megatron.oases.planner.planning import Planning
from megatron.oases.planner.report import degrees_of, recomputed_of
from megatron.oases.planner.search import Candidate
from megatron.oases.report.comparison import median_ms
from megatron.oases.report.runs import Launcher, Run
from megatron.oases.report.systems import shared_flags
from megatron.oases.sizes import GIB

RANKS = 4
_RANDOM_PLANS = 3
_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class PlanWorkload:
    """What is planned and trained: the reference workload with some flags changed, on a cluster and in a memory."""

    name: str
    nic_gbps: float
    changes: str
    memory_gib: float | None = None

    def flags(self, iterations: int) -> list[str]:
        overrides = ["--tensor-model-parallel-size", str(RANKS), *self.changes.split()]
        return shared_flags(recompute="none", iterations=iterations, overrides=overrides)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else round(self.memory_gib * GIB)

    @property
    def profile_name(self) -> str:
        """Of a file. Workloads that differ in memory only share a profile."""
        changes = self.changes.replace("--", "").replace(" ", "-")
        return f"plans-{'-'.join(filter(None, (changes, f'{self.nic_gbps:g}gbps')))}.json"

    @property
    def launcher(self) -> Launcher:
        # On two cores 0.4 leaves gloo's threads a fifth of the machine.
        return Launcher(
            ranks=RANKS, nic_gbps=self.nic_gbps, threads_per_rank=1, devices_per_server=2, device_speed=0.4
        )


_NARROW_AND_LONG = "--hidden-size 256 --seq-length 512 --max-position-embeddings 512"
PLAN_WORKLOADS = (
    PlanWorkload(name="reference", nic_gbps=0.5, changes=""),
    PlanWorkload(
        name="narrow and long",
        nic_gbps=0.25,
        changes=_NARROW_AND_LONG,
    ),
    # Degree 4 fits for all blocks, degree 2 for most of them only.
    PlanWorkload(name="narrow and long, little memory", nic_gbps=0.25, changes=_NARROW_AND_LONG, memory_gib=0.0516),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A plan that is run.

    Args:
        name: for tables.
        path: its file.
        plan: what is in it.
        predicted_ms: an iteration.
    """

    name: str
    path: Path
    plan: Plan
    predicted_ms: float


@dataclass(frozen=True, kw_only=True)
class PlanValidation:
    """One workload. `runs` are of the contenders, by name."""

    workload: PlanWorkload
    contenders: tuple[Contender, ...]
    runs: tuple[Run, ...]

    def measured_ms(self, contender: Contender) -> float:
        return median_ms(run for run in self.runs if run.system == contender.name)

    def rounds_ms(self, contender: Contender) -> list[float]:
        return [median_ms([run]) for run in self.runs if run.system == contender.name]

    @property
    def chosen_over_best(self) -> float:
        """Measured time of the planner's choice, over that of the fastest contender."""
        return self.measured_ms(self.contenders[0]) / min(map(self.measured_ms, self.contenders))

    def to_json(self) -> dict:
        return {
            "workload": self.workload.name,
            "nic_gbps": self.workload.nic_gbps,
            "chosen_over_best": self.chosen_over_best,
            "plans": {
                each.name: {
                    "degrees": degrees_of(each.plan.layers),
                    "recomputed": recomputed_of(each.plan.layers),
                    "sub_batches": each.plan.sub_batches,
                    "predicted_ms": each.predicted_ms,
                    "measured_ms": self.measured_ms(each),
                    "rounds_ms": self.rounds_ms(each),
                }
                for each in self.contenders
            },
        }


def contenders(workload: PlanWorkload, source: CostSource, parser: FlagParser, folder: Path) -> list[Contender]:
    """The planner's choice first, then the best uniform plan of every other degree, then plans drawn at random.

    Their files are written to the folder. All fit the workload's memory.
    """
    flags = workload.flags(1)
    planning = Planning(flags, source, parser, memory_bytes=workload.memory_bytes)
    found = planning.best(world_size=RANKS)
    chosen = planning.plan_of(found[0])
    plans = {"chosen": chosen} | {
        f"all {degree}": planning.plan_of(candidate)
        for degree, candidate in _uniform(found)
        if candidate.workload != found[0].workload
    }
    predicted = {name: plan.predicted.iteration_ms for name, plan in plans.items()}
    drawn = 0
    for plan in _random(chosen, workload.name):
        path = folder / f"random-{drawn + 1}.json"
        write_plan(path, plan)
        system = f"oases --oases-plan {path}"
        prediction = predict(
            flags, [system], source, parser=parser, world_size=RANKS, record=False, announce=lambda line: None
        )[system]
        if workload.memory_bytes is not None and prediction.peak_bytes > workload.memory_bytes:
            continue
        drawn += 1
        plans[f"random {drawn}"], predicted[f"random {drawn}"] = plan, prediction.iteration_ms
        if drawn == _RANDOM_PLANS:
            break
    return [_written(name, plan, predicted[name], folder) for name, plan in plans.items()]


def _written(name: str, plan: Plan, predicted_ms: float, folder: Path) -> Contender:
    path = folder / f"{name.replace(' ', '-')}.json"
    write_plan(path, plan)
    return Contender(name=name, path=path, plan=plan, predicted_ms=predicted_ms)


def _uniform(found: Sequence[Candidate]) -> Iterator[tuple[int, Candidate]]:
    """The fastest of each degree."""
    for degree in legal_degrees(RANKS, micro_batch=found[0].workload.micro_batch, sub_batches=1):
        for candidate in found:
            if set(candidate.workload.degrees) == {degree}:
                yield degree, candidate
                break


def _random(like: Plan, seed: str) -> Iterator[Plan]:
    """Each block with a legal degree, recomputed or not. The same ones every time."""
    draw = random.Random(seed)
    degrees = legal_degrees(like.tensor, micro_batch=like.micro_batch, sub_batches=like.sub_batches)

    def block() -> BlockPlan:
        return BlockPlan(degree=draw.choice(degrees), recomputed=draw.choice((False, True)))

    for _ in range(_DRAWS):
        layers = tuple(LayerPlan(attention=block(), mlp=block()) for _ in like.layers)
        yield replace(like, layers=layers, predicted=None, solver=None)


def plan_validation_table(validation: PlanValidation) -> Table:
    workload = validation.workload
    memory = "" if workload.memory_gib is None else f", {workload.memory_gib:g} GiB a device"
    table = Table(
        title=f"{workload.name}, NIC {workload.nic_gbps:g} Gbit/s{memory}",
        title_justify="left",
        caption=f"The planner's choice takes {validation.chosen_over_best:.3f} times as long as the fastest.",
        caption_justify="left",
    )
    for heading in ("plan", "degrees", "recomputed"):
        table.add_column(heading)
    for heading in ("sub-\nbatches", "predicted\nms", "measured\nms", "error", "rounds\nms"):
        table.add_column(heading, justify="right")
    for each in validation.contenders:
        measured_ms = validation.measured_ms(each)
        table.add_row(
            each.name,
            degrees_of(each.plan.layers),
            recomputed_of(each.plan.layers),
            str(each.plan.sub_batches),
            f"{each.predicted_ms:.0f}",
            f"{measured_ms:.0f}",
            f"{each.predicted_ms / measured_ms - 1:+.1%}",
            " ".join(f"{ms:.0f}" for ms in validation.rounds_ms(each)),
        )
    return table
