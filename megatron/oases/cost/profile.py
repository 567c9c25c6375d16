"""The cost model of a profile: what was measured, by interpolation what lies between, and nothing invented."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from megatron.oases.cost.fits import piecewise_linear, piecewise_log
from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.profile_file import (
    CollectiveSeries,
    OperationCell,
    Profile,
    read_profile,
)
from megatron.oases.cost.records import first_difference
from megatron.oases.cost.workload import Workload
from megatron.oases.errors import UsageError
from megatron.oases.schedule import Kind, Part, Role

# Beyond the largest measured number of samples the last slope is followed up to this many times that number.
_MOST_EXTRAPOLATED = 2
# A vocabulary that differs by less than this share is the same one, padded otherwise.
_SAME_VOCABULARY = 0.01


class ProfileCost:
    """Implements `CostModel` (cost/model.py).

    Args:
        profile: what was measured.
        file: where it stands, for messages.
        factor: by which computation takes longer than what the executor measured.
    """

    def __init__(self, profile: Profile, *, file: Path | str = "profile", factor: float = 1.0):
        self.profile = profile
        self._factor = factor
        self.announcements: set[str] = set()  # one line for each kind of value that lies beyond what was measured
        self._file = str(file)
        if (disturbance := profile.disturbance) is not None:
            self.announcements.add(f"{file}: {disturbance}; take it again with nothing else running")
        self._cells: dict[tuple[Kind, Role, int, bool], list[OperationCell]] = defaultdict(list)
        for cell in sorted(profile.operations, key=lambda cell: cell.samples):
            self._cells[cell.kind, cell.role, cell.degree, cell.kept].append(cell)
        self._series = {(series.collective, series.group): series for series in profile.collectives}
        self._contention = {cell.group: cell for cell in profile.contention}
        self._known_ms: dict[tuple, float] = {}

    def for_megatron(self, *, kept: bool) -> "ProfileCost":
        """The same for what Megatron itself runs, by autograd: its computation takes a little longer, or less.

        `kept`: whether the model keeps its graphs instead of being recomputed.
        """
        cost = ProfileCost(self.profile, file=self._file, factor=self._vanilla_factor(kept))
        cost.announcements = self.announcements
        return cost

    def compute_ms(self, kind: Kind, part: Part, *, degree: int, samples: int, pieces: int = 1) -> float:
        key = (kind, part, degree, samples)
        if key not in self._known_ms:
            in_pieces = kind in (Kind.ROW, Kind.COLUMN_GRAD)
            executor_ms = (self._gemm_ms if in_pieces else self._compute_ms)(kind, part, degree, samples)
            self._known_ms[key] = self._factor * executor_ms
        return self._known_ms[key] / pieces

    def collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        if group.size == 1 or size_bytes == 0:
            return 0.0
        key = (collective, group, size_bytes)
        if key not in self._known_ms:
            self._known_ms[key] = self._collective_ms(collective, group, size_bytes)
        return self._known_ms[key]

    def optimizer_ms(self, parameters: int) -> float:
        optimizer = self.profile.optimizer
        if optimizer.missing is not None:
            self._fail("the optimizer", optimizer.missing)
        return optimizer.fixed_ms + optimizer.ns_per_parameter * parameters * 1e-6

    def iteration_overhead_ms(self, micro_batches: int) -> float:
        overhead = self.profile.overhead
        if overhead.missing is not None:
            self._fail("the rest of an iteration", overhead.missing)
        return overhead.fixed_ms + overhead.per_micro_batch_ms * micro_batches

    def contention(self, group: Group) -> Contention:
        if group.size == 1:
            return Contention()
        cell = self._contention.get(group)
        if cell is None or cell.missing is not None:
            what = f"contention of computation and {group}"
            self._fail(what, "was not measured" if cell is None else cell.missing)
        return Contention(compute=cell.compute, communication=cell.communication)

    def _vanilla_factor(self, kept: bool) -> float:
        for cell in self.profile.vanilla:
            if cell.kept == kept:
                if cell.missing is not None:
                    self._fail("Megatron's own time", cell.missing)
                return cell.factor
        self._fail("Megatron's own time", "was not measured")

    def _compute_ms(self, kind: Kind, part: Part, degree: int, samples: int) -> float:
        what = f"{kind.value} of {part.role.value} at TP degree {degree}"
        # The ends keep their graphs, and were measured in one kind of session only.
        ways = (not part.recomputed, part.recomputed)
        series = next((cells for way in ways if (cells := self._cells.get((kind, part.role, degree, way)))), None)
        if series is None:
            self._fail(what, self._degrees(degree))
        measured = [cell for cell in series if cell.missing is None]
        exact = [cell.median_ms for cell in measured if cell.samples == samples]
        if exact:
            return exact[0]
        if not measured:
            self._fail(what, series[0].missing)
        xs, ys = [cell.samples for cell in measured], [cell.median_ms for cell in measured]
        refused = f"{samples} samples; measured: {', '.join(map(str, xs))}"
        if len(xs) == 1 or samples > _MOST_EXTRAPOLATED * xs[-1]:
            self._fail(what, f"{refused}; at most {_MOST_EXTRAPOLATED} x {xs[-1]} are extrapolated", samples)
        if samples < xs[0]:
            self._fail(what, f"{refused}; nothing is extrapolated to fewer", samples)
        if samples > xs[-1]:
            self.announcements.add(f"{self._file}: {samples} samples are extrapolated from {xs[-2]} and {xs[-1]}")
        return max(0.0, piecewise_linear(xs, ys, samples))

    def _gemm_ms(self, kind: Kind, part: Part, degree: int, samples: int) -> float:
        """A GEMM that was not measured by itself: the row-parallel one is what RECOMPUTE leaves out of FORWARD, the other
        takes as much longer as it has more FLOPs. That pieces of them are as efficient as wholes is assumed."""
        if part.role is Role.HEAD:
            return self._compute_ms(Kind.DGRAD, part, degree, samples)
        model, recomputed = self.profile.fingerprint.model, Part(part.role, recomputed=True)
        forward_ms, without_ms = (
            self._compute_ms(each, recomputed, degree, samples) for each in (Kind.FORWARD, Kind.RECOMPUTE)
        )
        row, column = model.ffn_hidden_size, model.column_width
        if part.role is Role.ATTENTION:
            row, column = model.heads * model.head_size, model.qkv_width
        return max(0.0, forward_ms - without_ms) * (1 if kind is Kind.ROW else column / row)

    def _collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        series = self._series.get((collective, group))
        if series is None or series.missing is not None:
            what = f"{collective.value} of {group}"
            self._fail(what, "was not measured" if series is None else series.missing)
        xs, ys = _columns(series)
        if size_bytes < xs[0]:
            return min(ys[0], _fitted_ms(series, size_bytes))
        if size_bytes > xs[-1]:
            self.announcements.add(
                f"{self._file}: {collective.value} of {group} was measured up to {xs[-1]} bytes; larger ones "
                f"follow the fitted bandwidth"
            )
            # From the last point on, so that more bytes never take less time.
            return ys[-1] + _fitted_ms(series, size_bytes) - _fitted_ms(series, xs[-1])
        return piecewise_log(xs, ys, size_bytes)

    def _degrees(self, degree: int) -> str:
        degrees = sorted({cell.degree for cell in self.profile.operations})
        if degree in degrees:
            return "was not measured"
        return f"degree {degree} was not measured; there are {', '.join(map(str, degrees))}"

    def _fail(self, what: str, why: str, samples: int | None = None) -> NoReturn:
        with_flags = "the same flags" if samples is None else f"--micro-batch-size {samples} among the flags"
        command = f"tools/oases_profiler.py with {with_flags}, as in {self.profile.command}"
        raise UsageError(f"{self._file}: {what}: {why}; measure it: {command}")


def load_profile_cost(path: Path, workload: Workload, options: Mapping[str, str]) -> ProfileCost:
    """The cost model of a profile that was taken for this workload.

    The number of layers, of devices along pipeline and data, of micro-batches and their size may differ from those of
    the profiled run.

    Args:
        path: the file.
        workload: what is to be predicted.
        options: its other options that change times; see cost/options.py.

    Raises:
        UsageError: the file is broken, or another model, TP degree, use of sequence parallelism or dropout, or another
            option was profiled.
    """
    profile = read_profile(path)
    ours = profile.fingerprint
    # Megatron pads the vocabulary to a multiple of the TP degree, so another degree may have a few rows more.
    may_differ = ["layers"]
    vocabulary, here = ours.model.padded_vocabulary, workload.model.padded_vocabulary
    if ours.layout.tensor != workload.tensor and abs(vocabulary - here) < _SAME_VOCABULARY * here:
        may_differ.append("padded_vocabulary")
    if difference := first_difference(ours.model, workload.model, but=tuple(may_differ)):
        raise UsageError(f"{path} is of another model: {difference}")
    if difference := first_difference(ours.options, options):
        raise UsageError(f"{path} was taken with other options: {difference}: profile again")
    degrees = {cell.degree for cell in profile.operations}
    if workload.tensor not in degrees:
        raise UsageError(
            f"{path} has no TP degree {workload.tensor}, only {', '.join(map(str, sorted(degrees)))}: profile with "
            f"--tensor-model-parallel-size {workload.tensor}"
        )
    if workload.tensor > 1 and ours.layout.sequence_parallel != workload.sequence_parallel:
        raise UsageError(
            f"{path} was taken {'with' if ours.layout.sequence_parallel else 'without'} --sequence-parallel: "
            "profile again"
        )
    for dropout in ("hidden_dropout", "attention_dropout"):
        then, now = getattr(ours.layout, dropout), getattr(workload, dropout)
        if then != now:
            flag = f"--{dropout.replace('_', '-')}"
            raise UsageError(f"{path} was taken {'with' if then else 'without'} {flag}: profile again")
    cost = ProfileCost(profile, file=path)
    for package, then in (("torch", ours.software.torch), ("megatron-core", ours.software.megatron_core)):
        now = metadata.version(package)
        if then != now:
            cost.announcements.add(f"{path} was taken with {package} {then}; here is {now}")
    return cost


def _columns(series: CollectiveSeries) -> tuple[Sequence[int], Sequence[float]]:
    return [point.size_bytes for point in series.points], [point.median_ms for point in series.points]


def _fitted_ms(series: CollectiveSeries, size_bytes: int) -> float:
    ms = series.fit.latency_ms + size_bytes * 8 / (series.fit.gbps * 1e6)
    assert math.isfinite(ms)
    return ms
