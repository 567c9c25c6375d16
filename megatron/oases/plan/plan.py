"""The plan file: what the planner writes, and a user may edit by hand."""

from dataclasses import dataclass
from pathlib import Path

from megatron.oases.cost.records import from_json, read_json_object, to_json, write_json_object
from megatron.oases.cost.workload import ModelShape
from megatron.oases.plan.degrees import LayerDegrees, format_degrees, legal_degrees, refusal

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Half a layer: its TP degree, and whether it keeps its input only and is recomputed in backward."""

    degree: int
    recomputed: bool


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    attention: BlockPlan
    mlp: BlockPlan

    @property
    def degrees(self) -> LayerDegrees:
        return LayerDegrees(self.attention.degree, self.mlp.degree)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner expects of an iteration.

    Args:
        by: `simulator`.
        exposed_ms: communication that nothing hides.
        in_flight_ms: while tensor-parallel collectives are in flight, on the stage that reports (the last one).
        waited_ms: while computation there stands still for them.
        memory_bytes: the most on one device.
    """

    by: str
    iteration_ms: float
    exposed_ms: float
    in_flight_ms: float
    waited_ms: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Solver:
    """How the plan was found. `gap`: how much better, relatively, another might be at most."""

    status: str
    gap: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a plan's times are of. `memory_bytes` is null where devices share the host's."""

    name: str
    backend: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All of the file.

    Args:
        model: what it is made for; it runs with no other.
        devices: what it is made for; null if nobody knows.
        costs: the profile or the cluster that the times are from.
        tensor: T, `--tensor-model-parallel-size`: the degree of embedding and head, and the largest that a block has.
        pipeline: pipeline stages, each with as many layers.
        data: data-parallel size.
        micro_batch: samples of a micro-batch of T devices.
        micro_batches: of an iteration.
        schedule: as in --oases-schedule.
        sub_batches: as in --oases-sub-batches.
        layers: in order.
        predicted: by the planner; null once somebody has changed the plan by hand.
        solver: likewise.
    """

    version: int
    model: ModelShape
    devices: Devices | None = None
    costs: str
    tensor: int
    pipeline: int = 1
    data: int
    micro_batch: int
    micro_batches: int
    schedule: str
    sub_batches: int
    layers: tuple[LayerPlan, ...]
    predicted: Predicted | None
    solver: Solver | None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batch", "micro_batches", "sub_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if len(self.layers) != self.model.layers:
            raise ValueError(f"layers are {len(self.layers)}, but model has {self.model.layers}")
        if len(self.layers) % self.pipeline:
            raise ValueError(f"layers are {len(self.layers)}, which pipeline {self.pipeline} does not divide")
        for number, layer in enumerate(self.layers):
            for name, degree in layer.degrees._asdict().items():
                sizes = {"micro_batch": self.micro_batch, "sub_batches": self.sub_batches}
                if error := refusal(degree, self.tensor, **sizes):
                    legal = ", ".join(map(str, legal_degrees(self.tensor, **sizes)))
                    raise ValueError(f"layers[{number}]: {name}: degree {degree} {error}; legal here: {legal}")

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """Attention, MLP, attention, …"""
        return tuple(block for layer in self.layers for block in (layer.attention, layer.mlp))

    @property
    def short_form(self) -> str:
        """Its degrees as in --oases-degrees."""
        return format_degrees([layer.degrees for layer in self.layers])


def read_plan(path: Path) -> Plan:
    """Raises `UsageError`, with the file and the key."""
    return from_json(Plan, read_json_object(path, version=VERSION), str(path))


def write_plan(path: Path, plan: Plan) -> None:
    """Raises `UsageError`."""
    write_json_object(path, to_json(plan))
