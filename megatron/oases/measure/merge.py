"""Two passes over all measurements, some minutes apart, made into one.

The repeats of one measurement follow each other, so that a slow minute of the machine hits them all, and their spread
does not show it. The other pass does. Of two times the shorter one counts: what else runs on a machine makes
computation and communication longer, never shorter. Of two factors, each a quotient of times, the mean counts.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from megatron.oases.cost.profile_file import (
    CollectivePoint,
    CollectiveSeries,
    ContentionCell,
    MemoryCell,
    OperationCell,
    OptimizerPoint,
    Overhead,
    VanillaCell,
)
from megatron.oases.measure.collectives import fitted_series

Cell = TypeVar("Cell")
Timed = TypeVar("Timed", OperationCell, CollectivePoint, OptimizerPoint)


def merge(cells: Sequence[Cell], key: Callable[[Cell], Hashable], both: Callable[[Cell, Cell], Cell]) -> list[Cell]:
    """One of each kind, in the order of the first pass.

    Args:
        cells: those of the first pass, and behind them those of the second.
        key: what both passes have measured.
        both: makes one of two. A cell that only one pass has, or that one alone has measured, is taken as it is.
    """
    merged: dict[Hashable, Cell] = {}
    for cell in cells:
        other = merged.get(key(cell))
        if other is None or getattr(other, "missing", None) is not None:
            merged[key(cell)] = cell
        elif getattr(cell, "missing", None) is None:
            merged[key(cell)] = both(other, cell)
    return list(merged.values())


def faster(first: Timed, second: Timed) -> Timed:
    """The one with the smaller median, and how far the other is from it."""
    less, more = sorted((first, second), key=lambda cell: cell.median_ms)
    return dataclasses.replace(less, passes_apart=_apart(less.median_ms, more.median_ms))


def merged_series(first: CollectiveSeries, second: CollectiveSeries) -> CollectiveSeries:
    """Merged at each size, and fitted anew."""
    points = merge((*first.points, *second.points), lambda point: point.size_bytes, faster)
    return fitted_series(first.collective, first.group, points)


def merged_contention(first: ContentionCell, second: ContentionCell) -> ContentionCell:
    return dataclasses.replace(
        first,
        compute=math.sqrt(first.compute * second.compute),
        communication=math.sqrt(first.communication * second.communication),
        passes_apart=max(
            _apart(first.compute, second.compute), _apart(first.communication, second.communication)
        ),
    )


def merged_vanilla(first: VanillaCell, second: VanillaCell) -> VanillaCell:
    factor = math.sqrt(first.factor * second.factor)
    return dataclasses.replace(first, factor=factor, passes_apart=_apart(first.factor, second.factor))


def smaller(first: Overhead, second: Overhead) -> Overhead:
    """It is a difference of longer times: how far the two are apart says little."""
    return min(first, second, key=lambda overhead: overhead.fixed_ms + overhead.per_micro_batch_ms)


def larger_peak(first: MemoryCell, second: MemoryCell) -> MemoryCell:
    return max(first, second, key=lambda cell: cell.peak_bytes)


def _apart(first: float, second: float) -> float:
    less, more = sorted((first, second))
    return more / less - 1 if less > 0 else 0.0
