"""The profile: what was measured on a cluster, as a versioned JSON file. See docs/profiler.md."""

from dataclasses import dataclass
from pathlib import Path

from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.records import from_json, read_json_object, to_json, write_json_object
from megatron.oases.cost.workload import ModelShape
from megatron.oases.schedule import Kind, Role

VERSION = 1
# Profiles of two CPU cores with nothing else on them spread by 8 to 19 %; one that was half as long again as it should
# be, by 30 %.
_DISTURBED_SPREAD = 0.25


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
    distributed_optimizer: bool


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
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "median_ms", "spread_ms")


@dataclass(frozen=True, kw_only=True)
class CollectivePoint:
    """One size of a collective. `size_bytes` is of the whole tensor, see `CostModel.collective_ms`."""

    size_bytes: int
    median_ms: float
    spread_ms: float
    repeats: int

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.median_ms <= 0:
            raise ValueError(f"{self.size_bytes} bytes in {self.median_ms} ms: both must be above 0")


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

    @property
    def group(self) -> Group:
        return Group(self.group_size, self.stride)


@dataclass(frozen=True, kw_only=True)
class ContentionCell:
    """Factors of at least 1 by which each gets slower while the other runs."""

    group_size: int
    stride: int
    compute: float | None
    communication: float | None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "compute", "communication")
        if self.missing is None and min(self.compute, self.communication) < 1:
            raise ValueError(f"contention below 1: compute {self.compute}, communication {self.communication}")


@dataclass(frozen=True, kw_only=True)
class VanillaCell:
    """How much longer Megatron itself computes than the operations of its list take together.

    Megatron runs a layer by autograd, the profile's operations are the executor's. Communication is left out.

    Args:
        kept: whether layers keep their graphs. Otherwise they are recomputed.
        factor: time of Megatron's forward and backward pass over the sum of the operations.
    """

    degree: int
    samples: int
    kept: bool
    factor: float | None
    missing: str | None = None

    def __post_init__(self) -> None:
        _check_measured(self, "factor")
        if self.factor == 0:
            raise ValueError("factor is 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerPoint:
    """Zeroing the gradients, clipping and stepping `parameters` parameters on one device: on the slowest rank."""

    parameters: int
    median_ms: float
    spread_ms: float
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """time = fixed + parameters · ns_per_parameter, fitted on relative error with that residual."""

    points: tuple[OptimizerPoint, ...]
    fixed_ms: float
    ns_per_parameter: float
    residual: float

    def __post_init__(self) -> None:
        if self.fixed_ms < 0 or self.ns_per_parameter < 0:
            numbers = f"fixed_ms {self.fixed_ms} and ns_per_parameter {self.ns_per_parameter}"
            raise ValueError(f"{numbers} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a training step takes beside its operations, its optimizer and its data-parallel communication."""

    fixed_ms: float
    per_micro_batch_ms: float

    def __post_init__(self) -> None:
        if self.fixed_ms < 0 or self.per_micro_batch_ms < 0:
            raise ValueError("an overhead is negative")


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


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Relative error with which the cells of other sizes give an operation's cell; null without three sizes."""

    operations_median: float | None
    operations_worst: float | None


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a measurement holds for. Two of them with the same fingerprint may stand in one file."""

    model: ModelShape
    layout: Layout
    device: Device
    software: Software


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

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the operations' times, as a share of these times."""
        measured = [cell for cell in self.operations if cell.missing is None]
        total_ms = sum(cell.median_ms for cell in measured)
        return sum(cell.spread_ms for cell in measured) / total_ms if total_ms else 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether something else seems to have run meanwhile."""
        return self.spread > _DISTURBED_SPREAD


def read_profile(path: Path) -> Profile:
    """Reads and checks a profile.

    Raises:
        UsageError: one line with the file, the key, and what is wrong with it.
    """
    return from_json(Profile, read_json_object(path, version=VERSION), str(path))


def write_profile(path: Path, profile: Profile) -> None:
    write_json_object(path, to_json(profile))
