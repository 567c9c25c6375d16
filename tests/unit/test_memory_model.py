"""What the memory model says, against sums worked out by hand. Its namesake in tests/distributed counts tensors."""

import itertools
import random

import pytest

from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.memory import ActivationMemory, stage_parameters, static_memory
from megatron.oases.cost.system import System
from megatron.oases.schedule import Idea, Role
from tests.unit.stand_in_cost import TableCost, shape, workload

MEGATRON = System(schedule="vanilla")
OASES = System(without=frozenset({Idea.KEEP_LAST_LAYER}))


def _after_forward(trained, system, stage=0):
    layout = system.layout(trained, stage)
    memory = ActivationMemory(trained, layout, system.sub_batch_sizes(trained))
    return sum(memory.effect(operation).after_bytes for operation in system.build(layout).forward)


def _a_layer(system, **changes):
    """In units of [s, b, h]: what another layer adds to what is kept between forward and backward."""
    few, many = (_after_forward(workload(shape(layers=layers), **changes), system) for layers in (2, 3))
    return (many - few) / workload().hidden_bytes(2)


@pytest.mark.parametrize(
    "system, changes, expected",
    [
        (MEGATRON, dict(recompute="full"), 1),
        (OASES, dict(recompute="full"), 2),
        (MEGATRON, dict(recompute="full", sequence_parallel=True), 1 / 2),
        (OASES, dict(recompute="full", sequence_parallel=True), 1),
    ],
)
def test_activations_a_layer_with_recomputation(system, changes, expected):
    assert _a_layer(system, **changes) == expected


def test_without_recomputation_the_scores_count():
    # Two x, two norms' outputs; halves of 3 (queries, keys, values), 1 (context), 4 and 4 (MLP); 4 heads of [16, 16].
    rest = 2 + 2 + (3 + 1 + 4 + 4) / 2
    scores = 4 * 16 * 16 / 2 / (16 * 16)
    assert _a_layer(OASES, recompute="none") == rest + scores
    assert _a_layer(MEGATRON, recompute="none") == rest + scores


@pytest.mark.parametrize("system", [MEGATRON, OASES, System()], ids=["megatron", "every layer", "oases"])
@pytest.mark.parametrize("recompute", ["full", "none", "block"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_all_that_is_allocated_is_freed(system, recompute, sequence_parallel, stages):
    for dropout, micro_batch, element_bytes in itertools.product((False, True), (2, 3), (2, 4)):
        trained = workload(
            shape(layers=6, element_bytes=element_bytes, gated_mlp=dropout, rms_norm=dropout),
            recompute=recompute,
            recompute_layers=1,
            sequence_parallel=sequence_parallel,
            pipeline=stages,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            micro_batch=micro_batch,
            unfused=element_bytes == 4,
        )
        for stage in range(stages):
            layout = system.layout(trained, stage)
            memory, schedule = ActivationMemory(trained, layout, system.sub_batch_sizes(trained)), system.build(layout)
            for order in (
                schedule.forward + schedule.backward,
                schedule.forward + schedule.steady + schedule.backward,
            ):
                allocated = 0
                for operation in order:
                    allocated += memory.effect(operation).after_bytes
                    assert allocated >= 0, operation
                assert allocated == 0


@pytest.mark.parametrize("system", [MEGATRON, OASES], ids=["megatron", "oases"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_all_is_freed_with_a_degree_for_every_block(system, sequence_parallel, stages):
    random_ = random.Random(0)
    for _ in range(20):
        trained = workload(
            shape(layers=6),
            tensor=4,
            micro_batch=8,
            pipeline=stages,
            sequence_parallel=sequence_parallel,
            hidden_dropout=random_.random() < 0.5,
            degrees=tuple(random_.choice((1, 2, 4)) for _ in range(12)),
            recomputed=tuple(random_.random() < 0.5 for _ in range(12)),
        )
        for stage in range(stages):
            layout = system.layout(trained, stage)
            memory, schedule = ActivationMemory(trained, layout, system.sub_batch_sizes(trained)), system.build(layout)
            allocated = 0
            for operation in schedule.forward + schedule.steady + schedule.backward:
                allocated += memory.effect(operation).after_bytes
                assert allocated >= 0, operation
            assert allocated == 0


def test_a_share_of_the_samples_at_a_lower_degree_keeps_more_weights_and_less_between():
    mixed, plain = (workload(shape(layers=2), tensor=4, micro_batch=8, degrees=degrees) for degrees in ((1,) * 4, ()))
    blocks = 2 * sum(plain.model.parameters(role, degree=1) for role in (Role.ATTENTION, Role.MLP))
    shards = 2 * sum(plain.model.parameters(role, degree=4) for role in (Role.ATTENTION, Role.MLP))
    assert stage_parameters(mixed, 0) - stage_parameters(plain, 0) == blocks - shards
    # x and the norm's output are of all samples or of a fourth. The rest is as large at any degree.
    of_x = 2 * 4 * plain.hidden_bytes(8)
    assert _after_forward(plain, OASES) - _after_forward(mixed, OASES) == of_x - of_x // 4


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow():
    trained = workload(shape(layers=4), pipeline=4, micro_batches=8, recompute="full")
    prediction = Simulator(TableCost()).predict(trained, MEGATRON, record=True)
    kept = _after_forward(trained, MEGATRON, stage=1)
    peaks = [stage.peak_bytes - stage.static.total_bytes for stage in prediction.stages]
    # Stages 1 and 2 are alike but for one micro-batch more that stage 1 holds.
    assert peaks[1] - peaks[2] == kept


def test_the_peak_is_the_most_over_time():
    trained = workload(shape(layers=4), micro_batches=3, recompute="full")
    for system in (MEGATRON, System()):
        (stage,) = Simulator(TableCost(collective_ms_per_kib=3.0)).predict(trained, system, record=True).stages
        assert max(size_bytes for _, size_bytes in stage.memory) == stage.peak_bytes
        assert stage.memory[-1][1] == stage.static.total_bytes


def test_static_memory_in_fp32():
    trained = workload()
    count = stage_parameters(trained, 0)
    assert count == sum(trained.model.parameters(role, degree=2) for role in Role)
    static = static_memory(trained, 0)
    assert static.parameters_bytes == static.gradients_bytes == 4 * count
    assert static.optimizer_bytes == 8 * count


def test_static_memory_in_half_precision_with_the_distributed_optimizer():
    trained = workload(shape(element_bytes=2), data=4, distributed_optimizer=True)
    count = stage_parameters(trained, 0)
    static = static_memory(trained, 0)
    assert (static.parameters_bytes, static.gradients_bytes) == (2 * count, 4 * count)
    assert static.optimizer_bytes == -(-count // 4) * 12


def test_the_last_stage_has_a_copy_of_tied_embeddings():
    tied, untied = (
        stage_parameters(workload(shape(layers=2, tied_embeddings=tied), pipeline=2), 1) for tied in (True, False)
    )
    assert tied == untied
