"""The profile: what was measured on a cluster, as a versioned JSON file. See docs/profiler.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.oases.available import Available
from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.records import from_json, read_json_object, to_json, write_json_object
from megatron.oases.cost.workload import ModelShape
from megatron.oases.schedule import Kind, Role
from megatron.oases.sizes import counted

VERSION = 2
# Profiles of two CPU cores with nothing else on them spread by 8 to 19 %; one that was half as long again as it should
# be, by 30 %.
_DISTURBED_SPREAD = 0.25
# Two passes over a measurement that differ by more are said to be apart. Now and then chance does that as well.
APART = 0.10
_DISTURBED_SHARE = 0.25  # of the time that all take together, in measurements whose passes are apart


def _check_measured(cell: object, *names: str) -> None:
    """A cell has all of its numbers, none of them negative, or it is marked as missing and has none."""
    values = [getattr(cell, name) for name in names]
    if cell.missing is not None:
        if any(value is not None for value in values):
            raise ValueError(f"is marked as missing ({cell.missing}), but has a value")
        return
    for name, value in zip(names, values, strict=True):
        if value is None:
            raise ValueError(f"{name} is null, and missing gives no reason")
        if value < 0:
            raise ValueError(f"{name} is {value}, must not be negative")


def _check_once(section: str, names: Iterable[str]) -> None:
    """Of two cells for the same thing one would be taken, silently."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{section}: {name} stands there twice")
        seen.add(name)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the profiled run is laid out. `micro_batch` is in samples, `micro_batches` are those of one iteration."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    micro_batches: int
    sequence_parallel: bool
    hidden_dropout: bool
    attention_dropout: bool


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes on. `threads` is 0 for a GPU."""

    name: str
    threads: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Software:
    """`commit` is null outside a checkout, and marked when files differ from it."""

    torch: str
    megatron_core: str
    python: str
    backend: str
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class OperationCell:
    """One computing operation.

    Args:
        samples: `b` of [s, b, h]; of all sub-batches together for LOSS, LOSS_GRAD and the embedding's WGRAD.
        kept: whether the part keeps its graphs for backward. Otherwise it is recomputed.
        median_ms: over repeats, of each of which the slowest rank counts; null where missing.
        spread_ms: distance between the first and the third quartile.
        repeats: measurements; a step has one for each layer.
        passes_apart: how much longer the slower of two passes took, as a share of the faster, which is the one that
            counts; null where one alone gave a number.
        missing: why there is no number; null where there is one.
    """

    kind: Kind
    role: Role
    degree: int
    samples: int
    kept: bool
    median_ms: float | None
    spread_ms: float | None
    repeats: int
    passes_apart: float | None = None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "median_ms", "spread_ms")

    def __str__(self) -> str:
        how = "graphs kept" if self.kept else "recomputed"
        samples = counted(self.samples, "sample")
        return f"{self.kind.value} of {self.role.value}, degree {self.degree}, {how}, {samples}"


@dataclass(frozen=True, kw_only=True)
class CollectivePoint:
    """One size of a collective. `size_bytes` is of the whole tensor, see `CostModel.collective_ms`."""

    size_bytes: int
    median_ms: float
    spread_ms: float
    repeats: int
    passes_apart: float | None = None

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.median_ms <= 0:
            raise ValueError(f"{self.size_bytes} bytes in {self.median_ms} ms: both must be above 0")

    def __str__(self) -> str:
        return f"a collective of {self.size_bytes} bytes"


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """time = latency + size / bandwidth, fitted on relative error.

    Args:
        residual: root mean square of the relative error at the measured points.
    """

    latency_ms: float
    gbps: float
    residual: float

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.gbps <= 0:
            raise ValueError(f"latency_ms {self.latency_ms} must not be negative, gbps {self.gbps} must be above 0")


@dataclass(frozen=True, kw_only=True)
class CollectiveSeries:
    """One collective on all groups of one shape at once.

    Args:
        points: by size.
        held_out_error: median relative error with which the other points give a point between them; null for less than
            three points.
    """

    collective: Collective
    group_size: int
    stride: int
    points: tuple[CollectivePoint, ...]
    fit: CollectiveFit | None
    held_out_error: float | None
    missing: str | None = None

    def __post_init__(self) -> None:
        sizes = [point.size_bytes for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"the sizes of {self.collective.value} do not increase")
        if (self.missing is None) != (self.fit is not None and len(sizes) > 1):
            raise ValueError(f"{self.collective.value} needs two points and a fit, or a reason in missing")
        assert self.group  # an impossible one is a ValueError

    def __str__(self) -> str:
        return f"{self.collective.value} of {self.group}"

    @property
    def group(self) -> Group:
        return Group(self.group_size, self.stride)


@dataclass(frozen=True, kw_only=True)
class ContentionCell:
    """Factors of at least 1 by which each gets slower while the other runs: the mean of two passes."""

    group_size: int
    stride: int
    compute: float | None
    communication: float | None
    passes_apart: float | None = None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "compute", "communication")
        if self.missing is None and min(self.compute, self.communication) < 1:
            raise ValueError(f"contention below 1: compute {self.compute}, communication {self.communication}")
        assert self.group  # an impossible one is a ValueError

    def __str__(self) -> str:
        return str(self.group)

    @property
    def group(self) -> Group:
        return Group(self.group_size, self.stride)


@dataclass(frozen=True, kw_only=True)
class VanillaCell:
    """How much longer Megatron itself computes than the operations of its list take together.

    Megatron runs a layer by autograd, the profile's operations are the executor's. Communication is left out.

    Args:
        kept: whether layers keep their graphs. Otherwise they are recomputed.
        factor: time of Megatron's forward and backward pass over the sum of the operations: the mean of two passes.
    """

    degree: int
    samples: int
    kept: bool
    factor: float | None
    passes_apart: float | None = None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "factor")
        if self.factor == 0:
            raise ValueError("factor is 0")

    def __str__(self) -> str:
        how = "graphs kept" if self.kept else "recomputed"
        return f"Megatron itself, degree {self.degree}, {how}, {counted(self.samples, 'sample')}"


@dataclass(frozen=True, kw_only=True)
class OptimizerPoint:
    """Zeroing the gradients, clipping and stepping `parameters` parameters on one device: on the slowest rank."""

    parameters: int
    median_ms: float
    spread_ms: float
    repeats: int
    passes_apart: float | None = None

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.median_ms <= 0:
            raise ValueError(f"{self.parameters} parameters in {self.median_ms} ms: both must be above 0")

    def __str__(self) -> str:
        return f"the optimizer on {counted(self.parameters, 'parameter')}"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """time = fixed + parameters · ns_per_parameter, fitted on relative error with that residual."""

    points: tuple[OptimizerPoint, ...]
    fixed_ms: float | None
    ns_per_parameter: float | None
    residual: float | None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "fixed_ms", "ns_per_parameter", "residual")


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a training step takes beside its operations, its optimizer and its data-parallel communication."""

    fixed_ms: float | None
    per_micro_batch_ms: float | None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "fixed_ms", "per_micro_batch_ms")


@dataclass(frozen=True, kw_only=True)
class MemoryCell:
    """The profiled model in memory: `layers` layers, a micro-batch of `samples`.

    Args:
        parameters_bytes: of the parameters that one rank holds.
        peak_bytes: highest use in training steps; on a GPU of its allocator, on the CPU of the process.
    """

    degree: int
    layers: int
    kept: bool
    samples: int
    parameters_bytes: int | None
    peak_bytes: int | None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "parameters_bytes", "peak_bytes")

    def __str__(self) -> str:
        how = "graphs kept" if self.kept else "recomputed"
        layers, samples = counted(self.layers, "layer"), counted(self.samples, "sample")
        return f"degree {self.degree}, {layers}, {samples}, {how}"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Relative error with which the cells of other sizes give an operation's cell; null without three sizes."""

    operations_median: float | None
    operations_worst: float | None


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a measurement holds for. Two of them with the same fingerprint may stand in one file.

    Args:
        options: Megatron's arguments that change what kernels run, by name; see cost/options.py.
        available: what the machine had for Megatron's defaults.
    """

    model: ModelShape
    layout: Layout
    options: dict[str, str]
    device: Device
    software: Software
    available: Available


# What measurements give: the parts of the file, the optimizer's points apart, before they are put together.
SECTIONS: dict[str, type] = {
    "operations": OperationCell,
    "collectives": CollectiveSeries,
    "contention": ContentionCell,
    "vanilla": VanillaCell,
    "optimizer": OptimizerPoint,
    "overhead": Overhead,
    "memory": MemoryCell,
}
Cell = OperationCell | CollectivePoint | OptimizerPoint | ContentionCell | VanillaCell


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All of the file. Its docstrings, from top to bottom, are those above."""

    version: int
    fingerprint: Fingerprint
    date: str
    command: str
    operations: tuple[OperationCell, ...]
    collectives: tuple[CollectiveSeries, ...]
    contention: tuple[ContentionCell, ...]
    vanilla: tuple[VanillaCell, ...]
    optimizer: Optimizer
    overhead: Overhead
    memory: tuple[MemoryCell, ...]
    held_out: HeldOut

    def __post_init__(self) -> None:
        for name in ("operations", "collectives", "contention", "vanilla", "memory"):
            _check_once(name, map(str, getattr(self, name)))
        for cell in self.in_passes:
            if cell.passes_apart < 0:
                raise ValueError(f"{cell}: passes_apart is {cell.passes_apart}, must not be negative")

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the operations' times, as a share of these times."""
        measured = [cell for cell in self.operations if cell.missing is None]
        total_ms = sum(cell.median_ms for cell in measured)
        return sum(cell.spread_ms for cell in measured) / total_ms if total_ms else 0.0

    @property
    def in_passes(self) -> list[Cell]:
        """All that two passes have measured."""
        cells = (*self.operations, *self.collective_points, *self.optimizer.points, *self.contention, *self.vanilla)
        return [cell for cell in cells if cell.passes_apart is not None]

    @property
    def collective_points(self) -> Iterator[CollectivePoint]:
        return (point for series in self.collectives for point in series.points)

    @property
    def apart(self) -> list[Cell]:
        """Those whose passes differ by more than a tenth."""
        return [cell for cell in self.in_passes if cell.passes_apart > APART]

    @property
    def disturbance(self) -> str | None:
        """Why something else seems to have run meanwhile; None if nothing does."""
        if self.spread > _DISTURBED_SPREAD:
            return f"the operations' times spread by {self.spread:.0%}"
        for name, cells in (("operations", self.operations), ("collectives", self.collective_points)):
            share = _share_apart(cells)
            if share > _DISTURBED_SHARE:
                return f"two passes differ by more than {APART:.0%} in {share:.0%} of the {name}' time"
        return None


def _share_apart(cells: Iterable[OperationCell | CollectivePoint]) -> float:
    times_ms = [(cell.passes_apart, cell.median_ms) for cell in cells if cell.passes_apart is not None]
    total_ms = sum(ms for _, ms in times_ms)
    return sum(ms for apart, ms in times_ms if apart > APART) / total_ms if total_ms else 0.0


def read_profile(path: Path) -> Profile:
    """Reads and checks a profile.

    Raises:
        UsageError: one line with the file, the key, and what is wrong with it.
    """
    return from_json(Profile, read_json_object(path, version=VERSION), str(path))


def write_profile(path: Path, profile: Profile) -> None:
    write_json_object(path, to_json(profile))
