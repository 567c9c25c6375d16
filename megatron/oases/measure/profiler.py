"""Takes a profile on all ranks, and keeps what is finished on the way."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from megatron.oases.arguments import OasesConfig
from megatron.oases.cost.fits import fit_line, held_out_errors, piecewise_linear
from megatron.oases.cost.profile_file import (
    VERSION,
    SECTIONS,
    Fingerprint,
    HeldOut,
    OperationCell,
    Optimizer,
    OptimizerPoint,
    Profile,
    write_profile,
)
from megatron.oases.cost.records import from_json
from megatron.oases.errors import UsageError
from megatron.oases.measure.fingerprint import fingerprint_of
from megatron.oases.measure.merge import (
    faster,
    larger_peak,
    merge,
    merged_contention,
    merged_series,
    merged_vanilla,
    smaller,
)
from megatron.oases.measure.partial import Partial
from megatron.oases.measure.ranks import gathered
from megatron.oases.measure.tasks import PASSES, Tasks
from megatron.oases.report.progress import RunsProgress, runs_progress


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
    # All of the first pass before any of the second, so that no slow minute of the machine hits both of a measurement.
    todo = {f"pass {number}: {task.name}": task for number in range(1, PASSES + 1) for task in tasks}
    with _progress(console, len(todo), is_first) as progress:
        for name, task in todo.items():
            if name not in finished:
                progress.start(name)
                finished[name] = task.measure()
                _agreed(lambda name=name: is_first and partial.add(name, finished[name]))
            progress.finish(name, "done")
    tasks.close()
    profile = assemble([finished[name] for name in todo], fingerprint=fingerprint, command=command, file=str(output))

    def write() -> None:
        if is_first:
            write_profile(output, profile)
            partial.remove()

    _agreed(write)
    return profile


def assemble(results: Sequence[dict], *, fingerprint: Fingerprint, command: str, file: str) -> Profile:
    """The profile that the measurements' results, by section of the file, make together.

    Args:
        results: of the first pass, and behind them those of the second.
        fingerprint: of the run.
        command: the command line.
        file: where the profile will stand, for messages.
    """
    found: dict[str, list] = defaultdict(list)
    for result in results:
        for name, entries in result.items():
            found[name] += from_json(tuple[SECTIONS[name], ...], entries, f"{file}: {name}")
    if not found["overhead"]:
        raise UsageError(f"{file}: nothing says what a step takes besides; add --restart to begin anew")
    operations = merge(found["operations"], str, faster)
    (overhead,) = merge(found["overhead"], lambda _: None, smaller)
    return Profile(
        version=VERSION,
        fingerprint=fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        operations=tuple(operations),
        collectives=tuple(merge(found["collectives"], str, merged_series)),
        contention=tuple(merge(found["contention"], str, merged_contention)),
        vanilla=tuple(merge(found["vanilla"], str, merged_vanilla)),
        optimizer=_optimizer(found["optimizer"], missing=next((cell.missing for cell in operations), None)),
        overhead=overhead,
        memory=tuple(merge(found["memory"], str, larger_peak)),
        held_out=_held_out(operations),
    )


def _optimizer(points: Sequence[OptimizerPoint], *, missing: str | None) -> Optimizer:
    """`missing`: why there is no point, where there is none."""
    if not points:
        reason = missing or "was not measured"
        return Optimizer(points=(), fixed_ms=None, ns_per_parameter=None, residual=None, missing=reason)
    points = tuple(sorted(merge(points, lambda point: point.parameters, faster), key=lambda point: point.parameters))
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
    except (UsageError, OSError) as error:
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
