"""Asynchronous collectives of one process group.

The handle owns its tensor while the collective is in flight: nobody else may hold a gradient that is being reduced.
With NCCL `wait` makes the current stream wait and returns at once; with gloo it blocks the host.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.oases.meter import Flight, Meter


@dataclass(slots=True)
class InFlight:
    """A collective that was started. `work` is None where there was nothing to do.

    `source` is what the collective reads: it must stay alive until the end. `arrange` puts what it brought into shape. Whoever has
    a `meter` gives the `flight` that it is told of.
    """

    tensor: torch.Tensor
    work: dist.Work | None
    source: torch.Tensor | None = None
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    meter: Meter | None = None
    flight: Flight | None = None

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> torch.Tensor:
        """Returns what the collective brought, valid for what is issued next on the current stream."""
        if self.work is not None:
            with nullcontext() if self.meter is None else self.meter.waiting(self.flight):
                self.work.wait()
        self.source = None
        return self.tensor if self.arrange is None else self.arrange(self.tensor)


class Collectives:
    """Starts the collectives of a schedule, in the order in which they are asked for.

    Args:
        group: the tensor-parallel process group, or one inside it.
        meter: is told of them.
    """

    def __init__(self, group: dist.ProcessGroup, meter: Meter | None = None):
        self._group = group
        self._meter = meter
        self.size = group.size()

    @property
    def host_sees_completion(self) -> bool:
        """Whether the host can tell that a collective has ended, so that it may choose what to do meanwhile."""
        return dist.get_backend(self._group) == dist.Backend.GLOO

    def all_reduce(self, tensor: torch.Tensor) -> InFlight:
        """Starts summing `tensor` (contiguous, any shape) in place over the group."""
        if self.size == 1:
            return InFlight(tensor, None)
        return self._started(tensor, lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_gather(self, tensor: torch.Tensor) -> InFlight:
        """Starts gathering `tensor` [s/t, ...] of every rank along the first dimension, to [s, ...]."""
        if self.size == 1:
            return InFlight(tensor, None)
        gathered = tensor.new_empty((tensor.shape[0] * self.size, *tensor.shape[1:]))
        return self._started(
            gathered,
            lambda: dist.all_gather_into_tensor(gathered, tensor, group=self._group, async_op=True),
            source=tensor,
        )

    def reduce_scatter(self, tensor: torch.Tensor) -> InFlight:
        """Starts summing `tensor` [s, ...] over the group; each rank gets its part [s/t, ...]."""
        if self.size == 1:
            return InFlight(tensor, None)
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        return self._started(
            part,
            lambda: dist.reduce_scatter_tensor(part, tensor, group=self._group, async_op=True),
            source=tensor,
        )

    def all_to_all(self, tensor: torch.Tensor, *, send: Sequence[int], receive: Sequence[int]) -> InFlight:
        """Starts sending `tensor` [sum of `send`] to the ranks of the group, in pieces of these lengths.

        `receive` are the lengths of what comes from them, which is put one behind the other.
        """
        received = tensor.new_empty(sum(receive))
        return self._started(
            received,
            lambda: dist.all_to_all_single(
                received, tensor, list(receive), list(send), group=self._group, async_op=True
            ),
            source=tensor,
        )

    def _started(
        self, tensor: torch.Tensor, start: Callable[[], dist.Work], *, source: torch.Tensor | None = None
    ) -> InFlight:
        if self._meter is None or not self._meter.is_on:
            return InFlight(tensor, start(), source=source)
        with self._meter.starting() as flight:
            flight.work = work = start()
        return InFlight(tensor, work, source=source, meter=self._meter, flight=flight)
