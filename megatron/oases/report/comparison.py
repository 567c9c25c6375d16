"""From runs to a comparison: medians, speed-ups, and how far the losses are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.oases.report.runs import Run

WARM_UP_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class SystemResult:
    """One system over all its rounds."""

    name: str
    rounds: tuple[Run, ...]

    @property
    def iteration_ms(self) -> float:
        """Median over the iterations of all rounds, without each round's warm-up."""
        return median(time_ms for run in self.rounds for time_ms in run.iterations_ms[WARM_UP_ITERATIONS:])

    @property
    def round_medians_ms(self) -> list[float]:
        return [median(run.iterations_ms[WARM_UP_ITERATIONS:]) for run in self.rounds]

    @property
    def tokens_per_s(self) -> float:
        return self.rounds[0].tokens_per_iteration / (self.iteration_ms / 1e3)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Systems in the order asked for. The first is what the others are compared with."""

    systems: tuple[SystemResult, ...]

    @classmethod
    def of_runs(cls, names: Sequence[str], runs: Sequence[Run]) -> "Comparison":
        return cls(
            systems=tuple(
                SystemResult(name=name, rounds=tuple(run for run in runs if run.system == name)) for name in names
            )
        )

    def speedup(self, system: SystemResult) -> float:
        return self.systems[0].iteration_ms / system.iteration_ms

    def loss_difference(self, system: SystemResult) -> float:
        """Largest over all iterations and rounds, from the first round of the first system."""
        reference = self.systems[0].rounds[0].losses
        return max(
            abs(loss - expected)
            for run in system.rounds
            for loss, expected in zip(run.losses, reference, strict=True)
        )

    @property
    def max_loss_difference(self) -> float:
        return max(self.loss_difference(system) for system in self.systems)

    def to_json(self, *, command: str, machine: dict[str, Any]) -> dict[str, Any]:
        """`iterations_ms` has every iteration, warm-up included; `losses` are the first round's."""
        return {
            "systems": {
                system.name: {
                    "iteration_ms": system.iteration_ms,
                    "iterations_ms": [list(run.iterations_ms) for run in system.rounds],
                    "tokens_per_s": system.tokens_per_s,
                    "losses": list(system.rounds[0].losses),
                }
                for system in self.systems
            },
            "speedup": {system.name: self.speedup(system) for system in self.systems},
            "max_loss_difference": self.max_loss_difference,
            "command": command,
            "machine": machine,
        }


def order_of_runs(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, system): every other round backwards, so that a machine that slows down favours nobody."""
    return [
        (round_number, name)
        for round_number in range(1, rounds + 1)
        for name in (names if round_number % 2 else reversed(names))
    ]
