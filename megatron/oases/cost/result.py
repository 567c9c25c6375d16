"""What a simulated iteration gives."""

from dataclasses import dataclass
from typing import Any

from megatron.oases.cost.memory import StaticMemory
from megatron.oases.cost.simulator import Span


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """A device of one pipeline stage. The first six times add up to the iteration.

    Args:
        compute_ms: its forward and backward computation, alone.
        exposed_ms: what its tensor-parallel collectives add to that: waits, and slow-down of computation meanwhile.
        pipeline_ms: sending to other stages and waiting for them.
        data_parallel_ms: what reducing gradients and gathering parameters adds.
        optimizer_ms: gradient clipping and Adam.
        overhead_ms: what an iteration takes besides.
        communication_ms: its tensor-parallel and data-parallel collectives, alone.
        in_flight_ms: while tensor-parallel collectives of its schedule are in flight.
        waited_ms: while computation stands still for them.
        static: what is in memory all the time.
        peak_bytes: the most that is in memory.
        memory: (ms, bytes) over time, where it was recorded.
    """

    compute_ms: float
    exposed_ms: float
    pipeline_ms: float
    data_parallel_ms: float
    optimizer_ms: float
    overhead_ms: float
    communication_ms: float
    in_flight_ms: float
    waited_ms: float
    static: StaticMemory
    peak_bytes: int
    memory: tuple[tuple[float, int], ...] = ()

    @property
    def iteration_ms(self) -> float:
        return (
            self.compute_ms
            + self.exposed_ms
            + self.pipeline_ms
            + self.data_parallel_ms
            + self.optimizer_ms
            + self.overhead_ms
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An iteration.

    Args:
        stages: of the pipeline, in order.
        tokens: of an iteration.
        degree: TP degree.
        timeline: in order of time, where it was recorded.
    """

    stages: tuple[StagePrediction, ...]
    iteration_ms: float
    tokens: int
    degree: int
    timeline: tuple[Span, ...] = ()

    @property
    def busiest(self) -> StagePrediction:
        """The stage that waits least for others, which is the one that says how long an iteration takes."""
        return min(self.stages, key=lambda stage: stage.pipeline_ms)

    @property
    def compute_ms(self) -> float:
        return self.busiest.compute_ms

    @property
    def communication_ms(self) -> float:
        return self.busiest.communication_ms

    @property
    def exposed_ms(self) -> float:
        """Communication that no computation hides, tensor- and data-parallel."""
        return self.busiest.exposed_ms + self.busiest.data_parallel_ms

    @property
    def hidden(self) -> float | None:
        """Share of the communication that is hidden; None where there is none."""
        if self.communication_ms == 0:
            return None
        return min(max(1 - self.exposed_ms / self.communication_ms, 0.0), 1.0)

    @property
    def peak_bytes(self) -> int:
        """Of the device that needs most."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.iteration_ms / 1e3)

    def to_json(self) -> dict[str, Any]:
        return {
            "iteration_ms": self.iteration_ms,
            "compute_ms": self.compute_ms,
            "communication_ms": self.communication_ms,
            "exposed_ms": self.exposed_ms,
            "hidden": self.hidden,
            "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes,
            "stages": [
                {
                    "compute_ms": stage.compute_ms,
                    "exposed_ms": stage.exposed_ms,
                    "pipeline_ms": stage.pipeline_ms,
                    "data_parallel_ms": stage.data_parallel_ms,
                    "optimizer_ms": stage.optimizer_ms,
                    "overhead_ms": stage.overhead_ms,
                    "communication_ms": stage.communication_ms,
                    "in_flight_ms": stage.in_flight_ms,
                    "waited_ms": stage.waited_ms,
                    "parameters_bytes": stage.static.parameters_bytes,
                    "gradients_bytes": stage.static.gradients_bytes,
                    "optimizer_bytes": stage.static.optimizer_bytes,
                    "peak_bytes": stage.peak_bytes,
                }
                for stage in self.stages
            ],
        }
