"""What holds beside exactness: dropout, random order of arrival, replicated weights, collectives and gradient buffers."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from megatron.oases.schedule import Idea
from tests.distributed.models import ModelCase, assert_close, batch, build, step
from tests.distributed.test_exactness import FULL, SELECTIVE, SP

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.2)


def _scheduled(case: ModelCase, sub_batches: int = 2, along_sequence: bool = False):
    from megatron.oases.runtime import attach_schedule

    model = build(case)
    attach_schedule(model, sub_batches=sub_batches, along_sequence=along_sequence)
    return model


def _step_with_dropout(config: dict, along_sequence: bool) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    case = ModelCase(rope=True, config={**DROPOUT, **config})
    model = _scheduled(case, along_sequence=along_sequence)
    torch.manual_seed(3)
    loss, gradients = step(model, batch(case))
    return loss, gradients, torch.rand(4)


def _recomputation_equals_none(rank: int, config: dict, along_sequence: bool):
    without = _step_with_dropout(config, along_sequence)
    assert step(_scheduled(ModelCase(rope=True)), batch(ModelCase(rope=True)))[0] != without[0], "nothing was dropped"
    for recompute in (FULL,) if along_sequence else (FULL, SELECTIVE):
        recomputed = _step_with_dropout({**config, **recompute}, along_sequence)
        assert recomputed[0] == without[0]
        for name, gradient in without[1].items():
            assert torch.equal(recomputed[1][name], gradient), name
        assert torch.equal(recomputed[2], without[2]), "the random state after the step differs"


@pytest.mark.parametrize(
    "config, along_sequence",
    [({}, False), (SP, False), ({}, True)],
    ids=["plain", "sequence parallel", "along the sequence"],
)
def test_with_dropout_recomputation_equals_none_bit_for_bit(world2, config, along_sequence):
    world2.run(_recomputation_equals_none, config=config, along_sequence=along_sequence)


def _recorded_collectives(case: ModelCase, delayed: bool) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    """One step; the all-reduces that it started, and its gradients. Optionally this rank is slow, at random."""
    from megatron.oases.runtime.collectives import Collectives

    model, started = _scheduled(case), []
    original = Collectives.all_reduce
    pause = torch.Generator().manual_seed(dist.get_rank())

    def all_reduce(self, tensor):
        if delayed:
            time.sleep(0.03 * torch.rand((), generator=pause).item())
        started.append(tuple(tensor.shape))
        return original(self, tensor)

    Collectives.all_reduce = all_reduce
    try:
        _, gradients = step(model, batch(case))
    finally:
        Collectives.all_reduce = original
    return started, gradients


def _delayed(rank: int):
    case = ModelCase(batch=5, config=FULL)
    on_time, expected = _recorded_collectives(case, delayed=False)
    late, gradients = _recorded_collectives(case, delayed=True)
    assert late == on_time
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name
    return late


def test_a_slow_rank_changes_nothing_and_every_rank_starts_the_same_collectives(world2):
    first, second = world2.run(_delayed)
    assert first == second
    assert {shape[1] for shape in first[2:]} == {2, 3}, "5 samples: sub-batches of 3 and 2"


def _count(rank: int, config: dict) -> int:
    return len(_recorded_collectives(ModelCase(config=config), delayed=False)[0])


@pytest.mark.parametrize("config", [{}, FULL], ids=["none", "full"])
def test_no_all_reduce_is_repeated_in_recomputation(world2, config):
    assert world2.run(_count, config=config) == [(3 * 2 + 1) * 2 * 2] * 2  # (blocks + an end), sub-batches, passes


def _filler(rank: int):
    """Gradients do not depend on what filled the waits: nothing, all that may, or what chance has it."""
    from megatron.oases.runtime.collectives import InFlight

    case = ModelCase(layers=1, config=FULL)
    model, original, results = _scheduled(case), InFlight.is_completed, []
    for is_completed in (original, lambda self: True, lambda self: False):
        InFlight.is_completed = is_completed
        try:
            results.append(step(model, batch(case))[1])
        finally:
            InFlight.is_completed = original
    for gradients in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(gradients[name], gradient), name


def test_gradients_do_not_depend_on_timing(world2):
    world2.run(_filler)


def _ablation(rank: int, without: frozenset):
    from megatron.oases.runtime import attach_schedule

    case = ModelCase(config=FULL)
    model, inputs = build(case), batch(case)
    vanilla = step(model, inputs)
    attach_schedule(model, sub_batches=2, without=without)
    oases = step(model, inputs)
    assert oases[0] == pytest.approx(vanilla[0], rel=1e-6)
    assert_close(oases[1], vanilla[1])


@pytest.mark.parametrize("without", [*Idea, None], ids=[*(idea.value for idea in Idea), "all"])
def test_equals_vanilla_whatever_is_left_out(world2, without):
    world2.run(_ablation, without=frozenset(Idea) if without is None else frozenset([without]))


def _lost_micro_batch(rank: int):
    from megatron.oases.runtime import attach_schedule

    case = ModelCase()
    model = build(case)
    attach_schedule(model, sub_batches=2, micro_batches=lambda: 2)
    model(**batch(case)).mean().backward()
    with pytest.raises(RuntimeError, match="announced 2 micro-batches and ran 1"):
        model.config.finalize_model_grads_func([model])
    with pytest.raises(ValueError, match="a micro-batch of 1 samples cannot be cut into 2 sub-batches"):
        model(**batch(ModelCase(batch=1)))


def test_a_backward_pass_is_never_lost_silently(world2):
    world2.run(_lost_micro_batch)


def _twenty_steps(rank: int):
    case = ModelCase(config={**FULL, **DROPOUT})
    model = _scheduled(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in range(20):
        step(model, batch(case, seed=seed))
        optimizer.step()
    replicated = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    assert len(replicated) > 3 * 4
    for name, parameter in replicated.items():
        copies = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(copies, parameter.detach())
        assert torch.equal(*copies), name


def test_replicated_weights_are_bit_identical_after_twenty_steps(world2):
    world2.run(_twenty_steps)


def _gradient_buffers(rank: int, overlap: bool, dtype: torch.dtype, tied: bool, config: dict):
    """Megatron's data-parallel wrapper: gradients land in its buffers, its hooks fire, over three micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from megatron.oases.runtime import attach_schedule

    bf16 = dtype is torch.bfloat16
    case = ModelCase(tied=tied, config={**config, "params_dtype": dtype, "bf16": bf16})
    results, losses = [], []
    for schedule in (False, True):
        model = build(case)
        if schedule:
            stage = attach_schedule(model, sub_batches=2, overlap_grad_reduce=overlap, micro_batches=lambda: 3)
            run, stage._executor.run = stage._executor.run, lambda *lists: (lists_run.append(len(lists)), run(*lists))
        if bf16:
            model = Float16Module(model.config, model)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=500 if overlap else None
        )
        wrapped = DistributedDataParallel(model.config, settings, model)
        lists_run = []
        for iteration in range(2):  # in the first one Megatron learns how often each hook fires
            wrapped.zero_grad_buffer()
            with wrapped.no_sync():
                for seed in (1, 2):
                    losses.append(_forward_backward(wrapped, batch(case, seed=seed + iteration)))
            losses.append(_forward_backward(wrapped, batch(case, seed=3 + iteration)))
            wrapped.finish_grad_sync()
        if schedule:  # how many micro-batches each list deals with: one forward or backward, two interleaved
            assert lists_run == ([2, 3, 2, 2, 2] if overlap else [2, 3, 3, 2]) * 2
        results.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
        assert all(p.grad is None for p in model.parameters())
    assert losses[:6] == pytest.approx(losses[6:], rel=1e-6 if not bf16 else 1e-2)
    assert_close(results[1], results[0], tolerance=2e-5 if not bf16 else 0.1)


def _forward_backward(model, inputs: dict[str, torch.Tensor | None]) -> float:
    loss = model(**inputs).float().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("config", [FULL, {}], ids=["full", "none"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["after", "overlapped"])
def test_megatrons_gradient_buffers_over_interleaved_micro_batches(world2, overlap, dtype, tied, config):
    world2.run(_gradient_buffers, overlap=overlap, dtype=dtype, tied=tied, config=config)


def _evaluation(rank: int):
    case = ModelCase(batch=1, config={**FULL, **DROPOUT})
    model = build(case).eval()
    inputs = batch(case)
    with torch.no_grad():
        expected = model(**inputs)
        from megatron.oases.runtime import attach_schedule

        attach_schedule(model, sub_batches=2)
        torch.testing.assert_close(model(**inputs), expected, rtol=1e-6, atol=1e-6)


def test_evaluation_takes_fewer_samples_than_sub_batches(world2):
    world2.run(_evaluation)


def _frozen(rank: int):
    from megatron.oases.runtime import attach_schedule

    case = ModelCase(config=FULL, tied=False)
    model, inputs = build(case), batch(case)
    _, expected = step(model, inputs)
    frozen = {name for name, _ in model.named_parameters() if "linear_fc1" in name or "embedding" in name}
    assert len(frozen) > 6
    attach_schedule(model, sub_batches=2)
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model(**inputs).float().mean().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if name not in frozen}
    assert all(p.grad is None for name, p in model.named_parameters() if name in frozen)
    assert_close(trained, {name: expected[name] for name in trained})


def test_frozen_parameters(world2):
    world2.run(_frozen)


def _patches_leave_others_alone(rank: int):
    """A vanilla model in a process where another model runs under a schedule."""
    case = ModelCase(config=FULL)
    vanilla = step(build(case), batch(case))
    _scheduled(case)
    again = step(build(case), batch(case))
    assert again[0] == vanilla[0]
    assert all(torch.equal(again[1][name], vanilla[1][name]) for name in vanilla[1])


def test_patches_leave_vanilla_models_alone(world2):
    world2.run(_patches_leave_others_alone)


def _leftovers(rank: int, config: dict, along_sequence: bool) -> list[str]:
    """What a step leaves behind."""
    from megatron.oases.runtime.cell import Cell, Graph, Tape
    from megatron.oases.runtime.chunks import Chunk
    from megatron.oases.runtime.linear import BiasGradient, LinearGradient

    case = ModelCase(config=config)
    model = _scheduled(case, along_sequence=along_sequence)
    step(model, batch(case))
    gc.collect()
    temporary = (Chunk, Cell, Graph, Tape, BiasGradient, LinearGradient)
    return [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, temporary)]


@pytest.mark.parametrize("along_sequence", [False, True], ids=["along batch", "along sequence"])
@pytest.mark.parametrize("config", [{}, FULL, {**FULL, **DROPOUT}], ids=["none", "full", "dropout"])
def test_bug_weight_gradients_kept_each_other_alive(world2, config, along_sequence):
    """A row-parallel linear's input led through its graph to the list that held it: 75 MB an iteration."""
    assert world2.run(_leftovers, config=config, along_sequence=along_sequence) == [[], []]
