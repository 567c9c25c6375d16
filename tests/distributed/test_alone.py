"""Steps with one half left out: on Megatron's own collectives and on the schedule's."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import ModelCase, batch, build, step
from tests.distributed.test_exactness import FULL, SP

CONFIGS = pytest.mark.parametrize("config", [FULL, SP | FULL], ids=["plain", "sequence parallel"])
SCHEDULES = pytest.mark.parametrize("scheduled", [False, True], ids=["vanilla", "oases"])
METHODS = ("allreduce", "all_gather_single", "reduce_scatter_single")


def _group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _train_step(config: dict, scheduled: bool):
    """Stands in for Megatron's: (losses, the rest ...)."""
    from megatron.oases.runtime import attach_schedule

    case = ModelCase(config=config)
    model = build(case)
    if scheduled:
        attach_schedule(model, sub_batches=2)

    def train_step() -> tuple:
        loss, gradients = step(model, batch(case))
        return {"lm loss": loss}, 0, gradients

    return train_step


class _Spy:
    """Notes what is started on the tensor-parallel group, and how much of it is in flight at most."""

    def __init__(self, group: dist.ProcessGroup):
        from megatron.oases.host.replacements import Replacements

        self.started: list[tuple] = []
        self.in_flight = self.most_in_flight = 0
        self.outputs: list[torch.Tensor] = []
        self._group = group
        self._replacements = Replacements()
        for name in METHODS:
            self._replacements.set(type(group), name, self._noting(name, getattr(type(group), name)))

    def _noting(self, name: str, original):
        spy = self

        def method(group, *arguments):
            work = original(group, *arguments)
            if group is not spy._group:
                return work
            tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if torch.is_tensor(t)]
            spy.started.append((name, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors)))
            spy.outputs.append(tensors[0])
            return _Noted(work, spy)

        return method

    def take(self) -> list[tuple]:
        started, self.started, self.outputs, self.most_in_flight = self.started, [], [], 0
        return started

    def undo(self) -> None:
        self._replacements.undo()


class _Noted:
    def __init__(self, work: dist.Work, spy: _Spy):
        self._work, self._spy, self._open = work, spy, True
        spy.in_flight += 1
        spy.most_in_flight = max(spy.most_in_flight, spy.in_flight)

    def wait(self, *arguments) -> bool:
        if self._open:
            self._open, self._spy.in_flight = False, self._spy.in_flight - 1
        return self._work.wait(*arguments)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _alone_without_the_other_rank(rank: int, config: dict, scheduled: bool) -> float:
    """Only rank 0 steps: a collective would wait for the other one until it times out."""
    from megatron.oases.report.alone import compute_only

    group = _group()
    before = {name: vars(type(group)).get(name) for name in METHODS}
    train_step = _train_step(config, scheduled)
    expected = train_step()
    loss = math.nan
    if rank == 0:
        losses, _, gradients = compute_only(train_step, _group)()
        loss = losses["lm loss"]
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        assert loss != expected[0]["lm loss"], "a rank alone has other sums"
    dist.barrier()
    assert {name: vars(type(group)).get(name) for name in METHODS} == before
    again = train_step()
    assert again[0] == expected[0]
    assert all(torch.equal(again[2][name], gradient) for name, gradient in expected[2].items())
    return loss


@CONFIGS
def test_computation_alone_waits_for_no_rank_and_is_the_same_arithmetic(world2, config):
    vanilla, oases = (
        world2.run(_alone_without_the_other_rank, config=config, scheduled=scheduled)[0]
        for scheduled in (False, True)
    )
    assert math.isfinite(vanilla)
    assert oases == pytest.approx(vanilla, rel=1e-6)


def _own_contributions(rank: int) -> list[torch.Tensor]:
    from megatron.oases.report.alone import compute_only

    group, other_group = _group(), dist.new_group([0, 1])
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    reduced, elsewhere = mine.clone(), mine.clone()
    gathered, part = torch.empty(4, 2), torch.empty(1, 2)

    def train_step() -> tuple:
        handles = [
            dist.all_reduce(reduced, group=group, async_op=True),
            dist.all_gather_into_tensor(gathered, mine, group=group, async_op=True),
        ]
        assert all(handle.is_completed() and handle.wait() for handle in handles)
        dist.reduce_scatter_tensor(part, mine, group=group)
        dist.all_reduce(elsewhere, group=other_group)
        return ({},)

    compute_only(train_step, _group)()
    return [reduced, gathered, part, elsewhere]


def test_computation_alone_has_each_ranks_own_contributions(world2):
    for rank, (reduced, gathered, part, elsewhere) in enumerate(world2.run(_own_contributions)):
        shift = 10 * rank
        assert (reduced - shift).tolist() == [[1, 2], [3, 4]]
        assert (gathered - shift).tolist() == [[1, 2], [3, 4]] * 2
        assert (part - shift).tolist() == [[1, 2], [3, 4]][rank : rank + 1]
        assert elsewhere.tolist() == [[12, 14], [16, 18]], "other groups communicate"


def _replayed(rank: int, config: dict, scheduled: bool) -> list[tuple]:
    from megatron.oases.report.alone import communication_only, starting_together

    group, train_step, steps = _group(), _train_step(config, scheduled), []
    expected = train_step()

    def counted() -> tuple:
        steps.append(1)
        return train_step()

    spy = _Spy(group)
    try:
        run = starting_together(communication_only(counted, _group))
        first = run()
        assert first[0] == expected[0], "the first step runs as it is"
        recorded = spy.take()
        for _ in range(2):
            result = run()
            assert spy.in_flight == 0, "a step ends when its collectives have"
            assert spy.most_in_flight == 2
            assert all(not output.any() for output in spy.outputs)
            assert spy.take() == recorded
        assert result[0] == {} and result[1:] == first[1:]
        assert len(steps) == 1, "later steps compute nothing"
    finally:
        spy.undo()
    assert train_step()[0] == expected[0]
    return recorded


@CONFIGS
@SCHEDULES
def test_communication_alone_repeats_the_steps_collectives(world2, config, scheduled):
    first, second = world2.run(_replayed, config=config, scheduled=scheduled)
    assert first == second
    names = {name for name, *_ in first}
    assert names == (set(METHODS) if config is not FULL else {"allreduce"})
    assert len(first) > 3 * 2 * 2  # blocks, forward and backward


def _no_collectives(rank: int):
    from megatron.oases.report.alone import communication_only, compute_only

    for alone in (compute_only, communication_only):
        with pytest.raises(AssertionError, match="started no tensor-parallel collective"):
            alone(lambda: ({},), _group)()


def test_a_step_whose_collectives_are_not_seen_is_no_measurement(world2):
    world2.run(_no_collectives)
