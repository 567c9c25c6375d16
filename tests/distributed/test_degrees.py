"""Blocks of their own degrees. The oracle is plain Megatron at degree T: weights after clipped steps are equal."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megatron.oases.schedule import ORDERINGS, Idea
from tests.distributed.models import ModelCase, batch, build
from tests.distributed.test_exactness import FULL, SP, SWIGLU

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """Some steps of Megatron's Adam with clipping, on two micro-batches each.

    Args:
        case: the model.
        degrees: short form of the plan; None for Megatron itself.
        attach: further arguments of `attach_schedule`.
        distributed: whether with the distributed optimizer, and with both overlaps.
    """

    case: ModelCase
    degrees: str | None = None
    attach: dict = field(default_factory=dict)
    distributed: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def _train(training: Training, *, breaks=lambda model: None) -> Trained:
    """Trains; gives the whole weights, after checking that all copies of each are bit-identical.

    `breaks`: a fault to be put into the scheduled model.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron.oases.plan import parse_degrees
    from megatron.oases.runtime import attach_schedule

    case, overlaps = training.case, training.distributed
    model = build(case)
    if training.degrees is not None:
        degrees = parse_degrees(training.degrees, layers=case.layers)
        attach = {"sub_batches": 2, "micro_batches": lambda: 2, **training.attach}
        attach_schedule(model, degrees=degrees, overlap_grad_reduce=overlaps, **attach)
        breaks(model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=training.distributed,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=2000 if overlaps else None,
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    # eps: what is zero but for rounding, as the gradient of a key's bias, shall not become a step of full length.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_eps=1e-4,
            clip_grad=0.05,
            use_distributed_optimizer=training.distributed,
            overlap_param_gather=overlaps,
        ),
        [wrapped],
    )
    finalize = model.config.finalize_model_grads_func or finalize_model_grads
    losses, norms = [], []
    for iteration in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        seed = 100 * parallel_state.get_data_parallel_rank() + 2 * iteration
        with wrapped.no_sync():
            losses.append(_forward_backward(wrapped, batch(case, seed=seed)))
        losses.append(_forward_backward(wrapped, batch(case, seed=seed + 1)))
        finalize([wrapped], None)
        succeeded, norm, _ = optimizer.step()
        assert succeeded
        norms.append(float(norm))
    if overlaps:
        wrapped.start_param_sync(force_sync=True)
    return Trained(losses=losses, norms=norms, weights=_whole_weights(model))


def _forward_backward(model, inputs) -> float:
    loss = model(**inputs).float().mean()
    loss.backward()
    return loss.item()


def _whole_weights(model) -> dict[str, torch.Tensor]:
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_group()
    whole = {}
    for name, parameter in model.named_parameters():
        copies = [None] * tensor.size()
        dist.all_gather_object(copies, parameter.detach().clone(), group=tensor)
        dim = getattr(parameter, "partition_dim", -1)
        degree = _degree_of(model, name) if dim >= 0 else 1
        for rank, copy in enumerate(copies):
            assert torch.equal(copy, copies[rank % degree]), f"{name}: rank {rank} has another copy"
        if dim >= 0:
            stride = parameter.partition_stride
            pieces = [copy.chunk(stride, dim=dim) for copy in copies[:degree]]
            whole[name] = torch.cat([piece[part] for part in range(stride) for piece in pieces], dim=dim)
        else:
            whole[name] = copies[0]
    return whole


def _degree_of(model, name: str) -> int:
    module = model.get_submodule(name.rpartition(".")[0])
    return module.tp_group.size()


def _differences(one: Trained, other: Trained) -> list[str]:
    """What is not equal to fp32 rounding."""
    found = []
    for name in ("losses", "norms"):
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
            if a != pytest.approx(b, rel=2e-5):
                found.append(f"{name}: {a} is not {b}")
    for name, weight in other.weights.items():
        difference = (one.weights[name] - weight).abs().max().item()
        if difference > 2e-5 * max(weight.abs().max().item(), 1.0):
            found.append(f"{name}: differs by {difference:.2e}")
    return found


def _assert_equal_plain(trainings: list[Training]) -> None:
    plain = {}
    for training in trainings:
        key = (repr(training.case), training.distributed)
        if key not in plain:
            plain[key] = _train(Training(case=training.case, distributed=training.distributed))
        found = _differences(_train(training), plain[key])
        assert not found, f"{training}: {found}"


def _equal_plain(rank: int, trainings: list[Training]):
    _assert_equal_plain(trainings)


def _equal_plain_in_two_replicas(rank: int, trainings: list[Training]):
    """The world of four as two tensor-parallel groups of two."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        _assert_equal_plain(trainings)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)


def _plain(**changes) -> ModelCase:
    return ModelCase(**{"layers": 4, "batch": 8, "sequence": 12, **changes})


MEGATRONS_ORDER = dict(ordering=ORDERINGS["vanilla"], sub_batches=1)
PLANS = ("4,2,2,4", "4/2,1/4,2/1,4", "1x4", "2x4", "1,4/2,2/4,1/2")
LLAMA = dict(rope=True, rmsnorm=True, tied=False)
MIXED = [(False, True), (True, False), (True, True), (False, False)]
CASES = {
    "plans": [Training(case=_plain(), degrees=degrees) for degrees in PLANS],
    # Attention masks of their own for each sample; fewer query groups than ranks, at degrees that both are and are not.
    "recomputed": [
        Training(case=_plain(masked=True, config=FULL), degrees=PLANS[4]),
        Training(
            case=_plain(**LLAMA, config={**SWIGLU, **FULL, "num_query_groups": 2}), degrees="2/4,1/2,4/1,2",
            attach=dict(sub_batches=1),
        ),
        Training(
            case=_plain(config={"num_query_groups": 1}), degrees=PLANS[1],
            attach=dict(recomputed=MIXED, without=frozenset(Idea)),
        ),
    ],
    "sequence parallelism": [
        *(Training(case=_plain(config={**SP, **FULL}), degrees=degrees) for degrees in (PLANS[1], PLANS[4])),
        Training(case=_plain(**LLAMA, config={**SP, **SWIGLU, "num_query_groups": 2}), degrees=PLANS[1]),
    ],
    "Megatron's order": [
        *(Training(case=_plain(config=FULL), degrees=degrees, attach=MEGATRONS_ORDER) for degrees in (PLANS[4], "4x4")),
        Training(case=_plain(), degrees=PLANS[1], attach=MEGATRONS_ORDER | dict(recomputed=MIXED)),
    ],
    "Megatron's order, sequence parallelism": [
        *(Training(case=_plain(config={**SP, **FULL}), degrees=degrees, attach=MEGATRONS_ORDER) for degrees in (PLANS[4], "4x4")),
        Training(case=_plain(config=SP), degrees=PLANS[1], attach=MEGATRONS_ORDER),
    ],
}  # fmt: skip
REPLICAS = [
    Training(case=_plain(config=FULL), degrees="2/1,1/2,1,2"),
    Training(case=_plain(config=FULL), degrees="2/1,1/2,1,2", distributed=True),
    Training(case=_plain(**LLAMA, config={**SP, **SWIGLU, "num_query_groups": 1}), degrees="1,1/2,2x2", distributed=True),
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_megatron(world4, name):
    world4.run(_equal_plain, trainings=CASES[name])


def test_equals_plain_megatron_with_data_parallelism(world4):
    world4.run(_equal_plain_in_two_replicas, trainings=REPLICAS)


def _without_the_sum(model) -> None:
    from megatron.oases.runtime.gradients import PeerGradients

    for cell in model.config.finalize_model_grads_func.__closure__:
        if isinstance(cell.cell_contents, PeerGradients):
            cell.cell_contents.reduce = lambda chunks: None


def _without_the_filter(model) -> None:
    for parameter in model.parameters():
        if getattr(parameter, "partition_dim", -1) >= 0:
            parameter.tensor_model_parallel = True


def _controls(rank: int):
    training = Training(case=_plain(), degrees="4,2,2,4")
    plain = _train(Training(case=training.case))
    with pytest.raises(AssertionError, match="another copy"):
        _train(training, breaks=_without_the_sum)
    found = _differences(_train(training, breaks=_without_the_filter), plain)
    assert any(line.startswith("norms") for line in found), found


def test_the_comparison_sees_a_missing_sum_and_a_missing_filter(world4):
    world4.run(_controls)


DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)


def _recomputation_equals_none(rank: int, config: dict, attach: dict):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    results = []
    for recompute in ({}, FULL):
        case = _plain(layers=2, config={**DROPOUT, **config, **recompute})
        trained = _train(Training(case=case, degrees="4/2,1/4", attach=attach))
        results.append((trained, torch.rand(2), get_cuda_rng_tracker().get_states()))
    (kept, drawn, states), (recomputed, drawn_again, states_again) = results
    assert kept.losses == recomputed.losses and kept.norms == recomputed.norms
    for name, weight in kept.weights.items():
        assert torch.equal(recomputed.weights[name], weight), name
    assert torch.equal(drawn, drawn_again)
    assert states.keys() == states_again.keys()
    assert all(torch.equal(states[name], states_again[name]) for name in states)


@pytest.mark.parametrize("attach", [{}, MEGATRONS_ORDER], ids=["oases", "Megatron's order"])
@pytest.mark.parametrize("config", [{}, SP], ids=["plain", "sequence parallel"])
def test_with_dropout_recomputation_equals_none_bit_for_bit(world4, config, attach):
    world4.run(_recomputation_equals_none, config=config, attach=attach)


def _masks(rank: int):
    """Whether a rank keeps what: of a block of degree 2, and of one of degree 4."""
    from megatron.oases.plan import parse_degrees
    from megatron.oases.runtime import attach_schedule

    case = _plain(layers=2, config=dict(hidden_dropout=0.5))
    model = build(case)
    stage = attach_schedule(model, sub_batches=2, degrees=parse_degrees("2/4,1", layers=2))
    found = []
    for place in (1, 2, 3):  # attention of degree 2, MLP of degree 4, attention of degree 1
        part = stage._executor._parts[place]
        kept = part._bias_dropout_add((torch.ones(64), torch.zeros(64)), torch.zeros(64)) > 0
        found.append(tuple(kept.tolist()))
    return found


def test_ranks_of_a_sub_group_drop_alike_and_sub_groups_do_not(world4):
    degree_2, degree_4, degree_1 = zip(*world4.run(_masks), strict=True)
    assert degree_2[0] == degree_2[1] != degree_2[2] == degree_2[3]
    assert len(set(degree_4)) == 1
    assert len(set(degree_1)) == 4


def _evaluation(rank: int):
    from megatron.oases.plan import parse_degrees
    from megatron.oases.runtime import attach_schedule

    case = _plain(layers=2, batch=4)
    model = build(case).eval()
    with torch.no_grad():
        expected = model(**batch(case))
        attach_schedule(model, sub_batches=2, degrees=parse_degrees("1,4", layers=2))
        torch.testing.assert_close(model(**batch(case)), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="sub-batches of 6 samples cannot be shared by 4 sub-groups"):
            model(**batch(_plain(layers=2, batch=6)))


def test_evaluation_takes_as_few_sub_batches_as_the_sub_groups_need(world4):
    world4.run(_evaluation)
