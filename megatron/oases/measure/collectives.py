"""Times every collective on its actual groups, all groups of a shape at once, since they share links."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.oases.cost.fits import fit_line, held_out_errors, piecewise_log
from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.profile_file import CollectiveFit, CollectivePoint, CollectiveSeries
from megatron.oases.measure.ranks import gathered, slowest

_SMALLEST_BYTES = 4 * 1024
_WARM_UP = 2
_FEWEST_REPEATS, _MOST_REPEATS = 3, 10  # of one pass of two
_SECONDS_A_SIZE = 0.5


def sizes_bytes(used: set[int]) -> list[int]:
    """Sizes to measure: powers of two from 4 KiB to twice the largest that is used, and those used themselves.

    Args:
        used: bytes of the activations that the schedule communicates.
    """
    sizes, size = {each for each in used if each >= _SMALLEST_BYTES}, _SMALLEST_BYTES
    while size <= 2 * max(*used, _SMALLEST_BYTES):
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def measure_collective(
    collective: Collective, shape: Group, group: dist.ProcessGroup | None, *, sizes: list[int], device: torch.device
) -> CollectiveSeries:
    """All sizes of one collective.

    Args:
        collective: which.
        shape: of the groups.
        group: this rank's group of that shape; None where it has no part in any: it only waits for those that have.
        sizes: bytes, increasing.
        device: where the tensors lie.
    """
    points = []
    reason = _refusal(_runner(collective, shape, group, sizes[0], device)[0])
    for found in gathered(reason):
        if found is not None:
            return CollectiveSeries(
                collective=collective, group_size=shape.size, stride=shape.stride,
                points=(), fit=None, held_out_error=None, missing=f"{dist.get_backend()}: {found}",
            )  # fmt: skip
    for size in sizes:
        run, actual = _runner(collective, shape, group, size, device)
        (timing,) = slowest({size: _times_ms(run, device)}).values()
        points.append(CollectivePoint(size_bytes=actual, **vars(timing)))
    return fitted_series(collective, shape, points)


def fitted_series(collective: Collective, shape: Group, points: Sequence[CollectivePoint]) -> CollectiveSeries:
    """The series of two or more measured points, in order of their sizes."""
    xs, ys = [point.size_bytes for point in points], [point.median_ms for point in points]
    line = fit_line(xs, ys)
    errors = sorted(held_out_errors(xs, ys, piecewise_log))
    return CollectiveSeries(
        collective=collective,
        group_size=shape.size,
        stride=shape.stride,
        points=tuple(points),
        # A slope of 0 would be an infinite bandwidth: then the largest size says what at least is there.
        fit=CollectiveFit(
            latency_ms=line.fixed, gbps=8e-6 / (line.slope or ys[-1] / xs[-1]), residual=line.residual
        ),
        held_out_error=errors[len(errors) // 2] if errors else None,
    )


def _refusal(run: Callable[[], None]) -> str | None:
    """What the backend says if it lacks a collective: at once, on every rank of the group. A lost connection is no
    such thing."""
    try:
        run()
    except RuntimeError as error:
        if "support" not in str(error).lower():
            raise
        return str(error).splitlines()[0]
    return None


def _times_ms(run: Callable[[], None], device: torch.device) -> list[float]:
    """Each repeat from a barrier on until the collective has ended on this rank."""
    times_ms: list[float] = []
    repeats, i = _FEWEST_REPEATS, 0
    while i < _WARM_UP + repeats:
        dist.barrier()
        _finish(device)
        start_s = time.perf_counter()
        run()
        _finish(device)
        ms = (time.perf_counter() - start_s) * 1e3
        if i == _WARM_UP - 1:  # the ranks agree on how often to go on
            slowest_ms = max(gathered(ms))
            repeats = int(min(max(_SECONDS_A_SIZE * 1e3 / slowest_ms, _FEWEST_REPEATS), _MOST_REPEATS))
        if i >= _WARM_UP:
            times_ms.append(ms)
        i += 1
    return times_ms


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runner(
    collective: Collective, shape: Group, group: dist.ProcessGroup | None, size_bytes: int, device: torch.device
) -> tuple[Callable[[], None], int]:
    """A function that runs the collective once, and the bytes of its whole tensor, rounded to whole parts."""
    count = max(1, size_bytes // 4 // shape.size) * shape.size
    whole = torch.zeros(count, dtype=torch.float32, device=device)
    part = torch.zeros(count // shape.size, dtype=torch.float32, device=device)
    if group is None:  # for torch that would be the group of all ranks
        return (lambda: None), count * whole.element_size()
    match collective:
        case Collective.ALL_REDUCE:
            run = lambda: dist.all_reduce(whole, group=group)  # noqa: E731
        case Collective.ALL_GATHER:
            run = lambda: dist.all_gather_into_tensor(whole, part, group=group)  # noqa: E731
        case Collective.REDUCE_SCATTER:
            run = lambda: dist.reduce_scatter_tensor(part, whole, group=group)  # noqa: E731
        case Collective.ALL_TO_ALL:
            received = torch.empty_like(whole)
            run = lambda: dist.all_to_all_single(received, whole, group=group)  # noqa: E731
        case Collective.SEND:
            run = lambda: _send_on(whole, group)  # noqa: E731
    return run, count * whole.element_size()


def _send_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every even rank of the group sends to the one behind it."""
    rank = group.rank()
    if rank % 2 == 0 and rank + 1 < group.size():
        dist.send(tensor, group_dst=rank + 1, group=group)
    elif rank % 2 == 1:
        dist.recv(tensor, group_src=rank - 1, group=group)
