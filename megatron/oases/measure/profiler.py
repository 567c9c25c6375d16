"""Takes a profile on all ranks, and keeps what is finished on the way."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from rich.console import Console

from megatron.oases.arguments import OasesConfig
from megatron.oases.cost.fits import fit_line, held_out_errors, piecewise_linear
from megatron.oases.cost.profile_file import (
    VERSION,
    CollectiveSeries,
    ContentionCell,
    Fingerprint,
    HeldOut,
    MemoryCell,
    OperationCell,
    Optimizer,
    OptimizerPoint,
    Overhead,
    Profile,
    VanillaCell,
    write_profile,
)
from megatron.oases.cost.records import from_json
from megatron.oases.errors import UsageError
from megatron.oases.measure.fingerprint import fingerprint_of
from megatron.oases.measure.partial import Partial
from megatron.oases.measure.ranks import gathered
from megatron.oases.measure.tasks import Tasks
from megatron.oases.report.progress import RunsProgress, runs_progress

T = TypeVar("T")


def take_profile(
    args: Namespace,
    config: OasesConfig,
    *,
    output: Path,
    restart: bool,
    repeats: int,
    degrees: Sequence[int] | None,
    command: str,
    console: Console,
) -> Profile:
    """Takes what measurements are missing, writes the file on rank 0, and returns the profile on all ranks.

    Args:
        args: Megatron's validated arguments; torch.distributed is up. They are changed.
        config: the Oases flags.
        output: the file. Beside it rank 0 keeps what is finished, until all is.
        restart: whether to begin anew, and replace a profile that is there.
        repeats: training steps that are timed for each number of samples.
        degrees: TP degrees to measure; all that divide the user's, if None.
        command: the command line, for the file.
        console: for the progress, on rank 0.

    Raises:
        UsageError: on every rank: a degree cannot be measured; the file is there already, cannot be written, or is of
            another run.
    """
    is_first = dist.get_rank() == 0
    tasks = Tasks(args, config, repeats=repeats, degrees=degrees)
    fingerprint = fingerprint_of(args, config.device)
    partial = _agreed(lambda: Partial(output, fingerprint, restart=restart) if is_first else None)
    (finished,) = _from_first([partial.finished if is_first else None])
    names = []
    with _progress(console, len(list(tasks)), is_first) as progress:
        for task in tasks:
            names.append(task.name)
            if task.name not in finished:
                progress.start(task.name)
                finished[task.name] = task.measure()
                _agreed(lambda task=task: is_first and partial.add(task.name, finished[task.name]))
            progress.finish(task.name, "done")
    tasks.close()
    profile = assemble([finished[name] for name in names], fingerprint=fingerprint, command=command, file=str(output))

    def write() -> None:
        if is_first:
            write_profile(output, profile)
            partial.remove()

    _agreed(write)
    return profile


def assemble(results: Sequence[dict], *, fingerprint: Fingerprint, command: str, file: str) -> Profile:
    """The profile that the measurements' results, by section of the file, make together."""
    sections: dict[str, list] = defaultdict(list)
    for result in results:
        for name, entries in result.items():
            sections[name] += entries

    def section(kind: type[T], name: str) -> tuple[T, ...]:
        return from_json(tuple[kind, ...], sections[name], f"{file}: {name}")

    operations = section(OperationCell, "operations")
    (overhead,) = section(Overhead, "overhead")
    return Profile(
        version=VERSION,
        fingerprint=fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        operations=operations,
        collectives=section(CollectiveSeries, "collectives"),
        contention=section(ContentionCell, "contention"),
        vanilla=section(VanillaCell, "vanilla"),
        optimizer=_optimizer(section(OptimizerPoint, "optimizer")),
        overhead=overhead,
        memory=section(MemoryCell, "memory"),
        held_out=_held_out(operations),
    )


def _optimizer(points: Sequence[OptimizerPoint]) -> Optimizer:
    points = tuple(sorted(points, key=lambda point: point.parameters))
    line = fit_line([point.parameters for point in points], [point.median_ms for point in points])
    return Optimizer(
        points=points, fixed_ms=line.fixed, ns_per_parameter=line.slope * 1e6, residual=line.residual
    )


def _held_out(cells: Sequence[OperationCell]) -> HeldOut:
    series: dict[tuple, dict[int, float]] = defaultdict(dict)
    for cell in cells:
        if cell.missing is None and cell.median_ms > 0:
            series[cell.kind, cell.role, cell.degree, cell.kept][cell.samples] = cell.median_ms
    errors = []
    for points in series.values():
        xs = sorted(points)
        errors += held_out_errors(xs, [points[x] for x in xs], piecewise_linear)
    errors.sort()
    return HeldOut(
        operations_median=errors[len(errors) // 2] if errors else None,
        operations_worst=errors[-1] if errors else None,
    )


def _agreed(action: Callable[[], Any]) -> Any:
    """Runs it on every rank, and raises on every rank what one of them finds wrong."""
    result = problem = None
    try:
        result = action()
    except UsageError as error:
        problem = str(error)
    for found in gathered(problem):
        if found is not None:
            raise UsageError(found)
    return result


def _from_first(values: list) -> list:
    dist.broadcast_object_list(values, src=0)
    return values


def _progress(console: Console, total: int, is_first: bool) -> AbstractContextManager[RunsProgress]:
    if is_first:
        return runs_progress(console, total=total)
    return nullcontext(RunsProgress(Console(quiet=True), total))
