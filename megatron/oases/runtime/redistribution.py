"""Moves activations, and their gradients, between blocks of different degrees.

Without sequence parallelism every rank of a sub-group has the whole sequence of its samples, so more sub-groups means a slice,
and fewer an all-gather along the batch. With it each rank has a part of the sequence of its samples, and one all-to-all
takes every piece to where it is needed.
"""

from math import lcm

import torch
from torch import Tensor

from megatron.oases.runtime.collectives import InFlight
from megatron.oases.runtime.groups import SubGroups


class Redistribution:
    """From the layout of one degree to that of another.

    Args:
        groups: of both degrees.
        source: the degree that it comes from.
        target: the degree that it goes to.
        sequence_parallel: whether it is split along the sequence.
    """

    def __init__(self, groups: SubGroups, source: int, target: int, *, sequence_parallel: bool):
        self._source, self._target = source, target
        # Sub-groups of both degrees fill these runs of ranks, which share the same samples.
        self._span = lcm(source, target)
        self._rank = groups.rank % self._span
        self._sequence_parallel = sequence_parallel
        self._collectives = groups.collectives(1 if sequence_parallel else source, self._span)

    def start(self, x: Tensor) -> InFlight:
        """[s, b/r, h] → [s, b/r', h], with sequence parallelism [s/t, b/r, h] → [s/t', b/r', h]; r = T/t sub-groups."""
        return self._exchange(x) if self._sequence_parallel else self._gather(x)

    def _gather(self, x: Tensor) -> InFlight:
        count, parts = self._span // self._source, self._span // self._target

        def arrange(gathered: Tensor) -> Tensor:
            """[count · s, b, h] → this sub-group's slice of [s, count · b, h]."""
            whole = gathered.view(count, *x_shape).transpose(0, 1).flatten(1, 2)
            return whole.chunk(parts, dim=1)[self._rank // self._target].contiguous()

        x_shape = x.shape
        in_flight = self._collectives.all_gather(x.contiguous())
        in_flight.arrange = arrange
        return in_flight

    def _exchange(self, x: Tensor) -> InFlight:
        whole = (x.shape[0] * self._source, x.shape[1] * (self._span // self._source))
        mine = self._box(self._rank, self._source, whole)
        wanted = self._box(self._rank, self._target, whole)
        others = range(self._span)
        sent = [_overlap(mine, self._box(rank, self._target, whole)) for rank in others]
        received = [_overlap(wanted, self._box(rank, self._source, whole)) for rank in others]
        h = x.shape[2]

        def arrange(flat: Tensor) -> Tensor:
            result = flat.new_empty((*map(len, wanted), h))
            pieces = flat.split([_area(box) * h for box in received])
            for box, piece in zip(received, pieces, strict=True):
                part = result[_slices(box, wanted)]
                part.copy_(piece.view(part.shape))
            return result

        flat = torch.cat([x[_slices(box, mine)].reshape(-1) for box in sent])
        in_flight = self._collectives.all_to_all(
            flat, send=[_area(box) * h for box in sent], receive=[_area(box) * h for box in received]
        )
        in_flight.arrange = arrange
        return in_flight

    def _box(self, rank: int, degree: int, whole: tuple[int, int]) -> "_Box":
        """The part of (sequence, samples) that a rank of the span has at that degree."""
        positions, samples = whole[0] // degree, whole[1] * degree // self._span
        start, first = rank % degree * positions, rank // degree * samples
        return range(start, start + positions), range(first, first + samples)


_Box = tuple[range, range]


def _overlap(one: _Box, other: _Box) -> _Box:
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return range(starts[0], stops[0]), range(starts[1], stops[1])


def _area(box: _Box) -> int:
    return len(box[0]) * len(box[1])


def _slices(box: _Box, within: _Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that holds `within`; an empty slice for an empty box."""
    if not _area(box):
        return slice(0, 0), slice(0, 0)
    return tuple(slice(part.start - of.start, part.stop - of.start) for part, of in zip(box, within, strict=True))
