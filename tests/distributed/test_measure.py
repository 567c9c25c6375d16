"""The profiler's measurements on three ranks of data parallelism."""

import pytest

from megatron.oases.cost.model import Collective, Group
from tests.distributed.world import World
from tests.system.small_gpt import MOCK_DATA, SMALL


@pytest.fixture(scope="module")
def world3():
    world = World(3)
    yield world
    world.close()


def _first_and_last(rank: int) -> list[tuple[int, float]]:
    import torch

    from megatron.oases.measure.collectives import measure_collective
    from megatron.oases.measure.ranks import new_group

    shape = Group(2, stride=2)
    group = new_group(shape)
    assert (group is None) == (rank == 1)
    series = measure_collective(
        Collective.ALL_REDUCE, shape, group, sizes=[4096, 8192], device=torch.device("cpu")
    )
    return [(point.size_bytes, point.median_ms) for point in series.points]


def test_bug_ranks_that_are_no_members_of_a_group_were_measured_as_members_of_all(world3):
    """The first and the last of three pipeline stages share a gradient; the stage between them has no part in it."""
    ranks = world3.run(_first_and_last)
    assert ranks[0] == ranks[1] == ranks[2], "all ranks write down the same times"
    assert [size_bytes for size_bytes, _ in ranks[0]] == [4096, 8192]


class _CountedClock:
    """It advances only when it is told to."""

    now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        """Nothing is outstanding."""


GATHER_MS = 7.0


def _step_with_a_slow_gather(rank: int) -> tuple[float, float]:
    import copy

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron.oases.measure.session import Session
    from megatron.oases.measure.setup import initialize

    layout = ["--tensor-model-parallel-size", "1", "--global-batch-size", "6", "--use-distributed-optimizer"]
    args, config = initialize(
        [*SMALL, *MOCK_DATA, *layout, "--train-iters", "5", "--eval-interval", "1000"], "cpu"
    )
    clock, gathers, gather = _CountedClock(), [], _ParamAndGradBucketGroup.start_param_sync

    def slow_gather(*arguments, **options):
        gathers.append(rank)
        clock.now_ms += GATHER_MS
        return gather(*arguments, **options)

    _ParamAndGradBucketGroup.start_param_sync = slow_gather
    try:
        session = Session(
            args, copy.copy(args), config, degree=1, layers=1, kept=True, vanilla=False, clock=clock
        )
        gathers.clear()
        (step,) = session.steps(1, samples=2)
        session.close()
    finally:
        _ParamAndGradBucketGroup.start_param_sync = gather
    assert gathers, "nothing was gathered"
    return step.optimizer_ms, step.rest_ms


def test_bug_the_distributed_optimizers_step_was_measured_with_its_all_gather(world3):
    assert world3.run(_step_with_a_slow_gather) == [(0.0, 0.0)] * 3
