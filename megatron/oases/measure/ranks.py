"""What all ranks have to agree on while they measure together."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron.oases.cost.model import Group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and distance between the quartiles of repeated measurements."""

    median_ms: float
    spread_ms: float
    repeats: int

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Timing":
        several = times_ms if len(times_ms) > 1 else [*times_ms, *times_ms]
        low, median, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median_ms=median, spread_ms=high - low, repeats=len(times_ms))


def gathered(value: T) -> list[T]:
    """The value of each rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(times_ms: Mapping[Hashable, Sequence[float]]) -> dict[Hashable, Timing]:
    """For each key and each repeat, the time of the rank that took longest: at the next collective all wait for it.

    The ranks have measured the same keys equally often, in the same order.
    """
    of_ranks = gathered({key: list(times) for key, times in times_ms.items()})
    return {
        key: Timing.of([max(together) for together in zip(*(times[key] for times in of_ranks), strict=True)])
        for key in times_ms
    }


def of_slowest_rank(times_ms: Sequence[float]) -> Timing:
    """That of the rank whose median is largest: for what begins and ends together, but has no wait in between."""
    return max(gathered(Timing.of(times_ms)), key=lambda timing: timing.median_ms)


def new_group(shape: Group) -> dist.ProcessGroup | None:
    """This rank's group of that shape, None if it is in none; all ranks call it together."""
    mine, _ = dist.new_subgroups_by_enumeration(shape.ranks(dist.get_world_size()))
    return mine
