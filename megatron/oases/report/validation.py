"""Predicted against measured: the same workloads through the simulator, from a profile, and through whole runs.

Both the profile and the runs are taken on the emulated cluster, a server a rank. A profile that lies in the folder
already is used again.
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from megatron.oases.report.comparison import median_ms, order_of_runs
from megatron.oases.report.runs import REPOSITORY, Launcher, RunFailed, run_once
from megatron.oases.report.systems import shared_flags, system_flags, world_size

_LAST_LINES = 40


@dataclass(frozen=True, kw_only=True)
class ValidationWorkload:
    """What is trained: the reference workload with some flags changed."""

    name: str
    recompute: str
    changes: tuple[str, ...] = ()

    def flags(self, iterations: int) -> list[str]:
        return shared_flags(recompute=self.recompute, iterations=iterations, overrides=self.changes)


def _workload(name: str, recompute: str, changes: str = "") -> ValidationWorkload:
    return ValidationWorkload(name=name, recompute=recompute, changes=tuple(changes.split()))


WORKLOADS = (
    _workload("reference", "full"),
    _workload("no recomputation", "none"),
    _workload("wide, 2 layers", "full", "--num-layers 2 --hidden-size 768 --num-attention-heads 12"),
    _workload(
        "narrow, 8 layers", "none",
        "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 8 --global-batch-size 8",
    ),
    _workload(
        "two micro-batches", "full",
        "--num-layers 3 --hidden-size 384 --num-attention-heads 6 --micro-batch-size 4 --global-batch-size 8",
    ),
    _workload(
        "micro-batch of 2", "full",
        "--num-layers 6 --hidden-size 640 --num-attention-heads 10 --micro-batch-size 2 --global-batch-size 2",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one network."""

    workload: ValidationWorkload
    nic_gbps: float

    @property
    def name(self) -> str:
        return f"{self.workload.name}, {self.nic_gbps:g} Gbit/s"

    def profile_path(self, folder: Path) -> Path:
        return folder / f"{self.workload.name.replace(', ', '-').replace(' ', '-')}-{self.nic_gbps:g}gbps.json"

    def launcher(self, cores: int) -> Launcher:
        ranks = world_size(self.workload.flags(1))
        return Launcher(ranks=ranks, nic_gbps=self.nic_gbps, threads_per_rank=max(1, cores // ranks))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One system in one case."""

    case: Case
    system: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative, above 0 where the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, kw_only=True)
class Validation:
    compared: tuple[Compared, ...]

    @property
    def errors(self) -> list[float]:
        return [abs(each.error) for each in self.compared]

    @property
    def median_error(self) -> float:
        return median(self.errors)

    @property
    def worst_error(self) -> float:
        return max(self.errors)

    def ranking_is_right(self, case: Case) -> bool:
        """Whether the systems come in the same order, predicted and measured."""
        own = [each for each in self.compared if each.case == case]
        predicted = sorted(own, key=lambda each: each.predicted_ms)
        measured = sorted(own, key=lambda each: each.measured_ms)
        return predicted == measured

    @property
    def right_rankings(self) -> tuple[int, int]:
        """(cases with the right order, all cases)."""
        cases = list(dict.fromkeys(each.case for each in self.compared))
        return sum(map(self.ranking_is_right, cases)), len(cases)

    def to_json(self) -> dict:
        right, cases = self.right_rankings
        return {
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "right_rankings": right,
            "cases": cases,
            "compared": [
                {
                    "workload": each.case.workload.name,
                    "nic_gbps": each.case.nic_gbps,
                    "system": each.system,
                    "predicted_ms": each.predicted_ms,
                    "measured_ms": each.measured_ms,
                    "error": each.error,
                }
                for each in self.compared
            ],
        }


def take_profile(
    name: str,
    flags: Sequence[str],
    launcher: Launcher,
    path: Path,
    *,
    degrees: Sequence[int],
    on_line: Callable[[str], None],
) -> None:
    """Runs the profiler on the launcher's cluster. Raises `RunFailed`.

    Args:
        name: for messages.
        flags: the training command's.
        launcher: its cluster.
        path: of the profile.
        degrees: that are measured.
        on_line: is given what the profiler prints.
    """
    tool = [str(REPOSITORY / "tools" / "oases_profiler.py"), "--output", str(path)]
    tool += ["--degrees", *map(str, degrees), "--", *flags]
    process = subprocess.run(
        launcher.command(tool),
        env=launcher.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = process.stdout.splitlines()
    for line in lines:
        on_line(line)
    if process.returncode:
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        message = f"the profiler for {name} ended with exit code {code}"
        raise RunFailed(message, last_lines=lines[-_LAST_LINES:], exit_code=code)


def measure(
    case: Case,
    launcher: Launcher,
    systems: Sequence[str],
    *,
    rounds: int,
    iterations: int,
    on_line: Callable[[str], None],
) -> dict[str, float]:
    """Median ms of an iteration of each system's fastest round. Raises `RunFailed`.

    Of two passes the profile keeps the faster one, so a slow minute must not count here either.
    """
    flags, runs = case.workload.flags(iterations), []
    for round_number, system in order_of_runs(systems, rounds):
        runs.append(
            run_once(
                launcher,
                system=system,
                round_number=round_number,
                flags=[*flags, *system_flags(system)],
                iterations=iterations,
                on_line=on_line,
            )
        )
    return {system: min(median_ms([run]) for run in runs if run.system == system) for system in systems}


def cases(workloads: Sequence[int], nics_gbps: Sequence[float]) -> Iterator[Case]:
    """Every workload, by its number from 1, on every network."""
    for number in workloads:
        for nic_gbps in nics_gbps:
            yield Case(workload=WORKLOADS[number - 1], nic_gbps=nic_gbps)


def validation_table(validation: Validation) -> Table:
    right, cases = validation.right_rankings
    table = Table(
        title="Predicted against measured",
        title_justify="left",
        caption=f"Error: median {validation.median_error:.1%}, worst {validation.worst_error:.1%}. "
        f"Order of the systems right in {right} of {cases} cases.",
        caption_justify="left",
    )
    table.add_column("workload", no_wrap=True)
    table.add_column("NIC\nGbit/s", justify="right", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for heading in ("predicted\nms", "measured\nms", "error", "order"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in validation.compared:
        table.add_row(
            each.case.workload.name,
            f"{each.case.nic_gbps:g}",
            each.system,
            f"{each.predicted_ms:.1f}",
            f"{each.measured_ms:.1f}",
            f"{each.error:+.1%}",
            "right" if validation.ranking_is_right(each.case) else "wrong",
        )
    return table
