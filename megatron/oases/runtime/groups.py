"""Process groups inside a tensor-parallel group, for blocks whose degree is less than T.

Rank p of T ranks, in a block of degree t: it has shard p % t of the block's weights, and belongs to sub-group p // t, which
computes that one of T/t equal slices, along the batch, of every sub-batch. Ranks with the same shard are peers.
"""

from collections.abc import Collection
from datetime import timedelta
from math import lcm

import torch.distributed as dist

from megatron.oases.meter import Meter
from megatron.oases.runtime.collectives import Collectives


def members(inner: int, outer: int, size: int) -> list[list[int]]:
    """Ranks of `size` that belong together: within runs of `outer` ranks, those that are `inner` apart.

    (1, t) are the sub-groups of degree t, (t, size) their peers.
    """
    together: dict[tuple[int, int], list[int]] = {}
    for rank in range(size):
        together.setdefault((rank // outer, rank % inner), []).append(rank)
    return list(together.values())


class SubGroups:
    """The groups that blocks of several degrees need. Every rank of the world must make them at the same time.

    Args:
        tensor: the tensor-parallel group, of T ranks.
        degrees: those of all blocks of the model, also of other pipeline stages.
        meter: is told of their collectives.
        timeout: of their collectives; None: the backend's.
    """

    def __init__(
        self,
        tensor: dist.ProcessGroup,
        degrees: Collection[int],
        *,
        meter: Meter | None = None,
        timeout: timedelta | None = None,
    ):
        self._meter = meter
        self._timeout = timeout
        self.size, self.rank = tensor.size(), tensor.rank()
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {(1, self.size): tensor}
        self._collectives: dict[tuple[int, int], Collectives] = {}
        if set(degrees) - {self.size}:
            self._create(tensor, sorted({*degrees, self.size}))

    def _create(self, tensor: dist.ProcessGroup, degrees: list[int]) -> None:
        spans = {(1, degree) for degree in degrees}
        for degree in degrees:
            for other in degrees:
                span = lcm(degree, other)
                spans |= {(1, span), (degree, span)}  # for what moves between these degrees
        tensors: list = [None] * dist.get_world_size()
        dist.all_gather_object(tensors, tuple(dist.get_process_group_ranks(tensor)))
        for inner, outer in sorted(spans - self._groups.keys()):
            for ranks in sorted(set(tensors)):
                for together in members(inner, outer, self.size):
                    group = dist.new_group([ranks[place] for place in together], timeout=self._timeout)
                    if ranks == tensors[dist.get_rank()] and self.rank in together:
                        self._groups[inner, outer] = group

    def sub_group(self, degree: int) -> dist.ProcessGroup:
        """The ranks that share one copy of a block of that degree."""
        return self._groups[1, degree]

    def peers(self, degree: int) -> dist.ProcessGroup:
        """The ranks that have the same shard of it."""
        return self._groups[degree, self.size]

    def collectives(self, inner: int, outer: int) -> Collectives:
        """Those of this rank's group among `members(inner, outer, T)`."""
        if (inner, outer) not in self._collectives:
            self._collectives[inner, outer] = Collectives(self._groups[inner, outer], self._meter)
        return self._collectives[inner, outer]
