"""From runs to a comparison: medians, speed-ups, and how far the losses are apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.oases.report.bound import Bound
from megatron.oases.report.runs import Half, Run

WARM_UP_ITERATIONS = 2


def median_ms(runs: Iterable[Run]) -> float:
    """Median over the iterations of all runs, without each one's warm-up."""
    return median(time_ms for run in runs for time_ms in run.iterations_ms[WARM_UP_ITERATIONS:])


@dataclass(frozen=True, kw_only=True)
class SystemResult:
    """One system over all its rounds."""

    name: str
    rounds: tuple[Run, ...]
    compute_only: tuple[Run, ...] = ()
    communication_only: tuple[Run, ...] = ()

    @property
    def iteration_ms(self) -> float:
        return median_ms(self.rounds)

    @property
    def round_medians_ms(self) -> list[float]:
        return [median_ms([run]) for run in self.rounds]

    @property
    def bound(self) -> Bound | None:
        """None if the halves were not measured."""
        if not (self.compute_only and self.communication_only):
            return None
        return Bound(
            measured_ms=self.iteration_ms,
            compute_only_ms=median_ms(self.compute_only),
            communication_only_ms=median_ms(self.communication_only),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.rounds[0].tokens_per_iteration / (self.iteration_ms / 1e3)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Systems in the order asked for. The first is what the others are compared with."""

    systems: tuple[SystemResult, ...]

    @classmethod
    def of_runs(cls, names: Sequence[str], runs: Sequence[Run]) -> "Comparison":
        def of(name: str, only: Half | None) -> tuple[Run, ...]:
            return tuple(run for run in runs if run.system == name and run.only == only)

        return cls(
            systems=tuple(
                SystemResult(
                    name=name,
                    rounds=of(name, None),
                    compute_only=of(name, "compute"),
                    communication_only=of(name, "communication"),
                )
                for name in names
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
                    **_bound_to_json(system.bound),
                }
                for system in self.systems
            },
            "speedup": {system.name: self.speedup(system) for system in self.systems},
            "max_loss_difference": self.max_loss_difference,
            "command": command,
            "machine": machine,
        }


def _bound_to_json(bound: Bound | None) -> dict[str, float]:
    if bound is None:
        return {}
    return {
        "compute_only_ms": bound.compute_only_ms,
        "communication_only_ms": bound.communication_only_ms,
        "bound_ms": bound.bound_ms,
        "efficiency": bound.efficiency,
        "communication_hidden": bound.communication_hidden,
    }


def order_of_runs[Item](items: Sequence[Item], rounds: int) -> list[tuple[int, Item]]:
    """(round, item): every other round backwards, so that a machine that slows down favours nobody."""
    return [
        (round_number, item)
        for round_number in range(1, rounds + 1)
        for item in (items if round_number % 2 else reversed(items))
    ]
