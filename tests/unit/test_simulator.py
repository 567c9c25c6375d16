"""Simulated times against times worked out by hand."""

import dataclasses

import pytest

from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.model import Contention, Group
from megatron.oases.cost.pipeline import single_stage_steps
from megatron.oases.cost.redistribution import Redistribution
from megatron.oases.cost.simulator import StageSimulator
from megatron.oases.cost.system import System
from megatron.oases.schedule import Filler, Idea, Kind, Layout, Part, Role, build_oases_schedule, collectives, walk
from tests.unit.stand_in_cost import BLOCK_MS, TableCost, shape, workload

BLOCK_FORWARD_MS = BLOCK_MS[Kind.FORWARD] + BLOCK_MS[Kind.JOIN]
BLOCK_BACKWARD_MS = sum(
    BLOCK_MS[kind] for kind in (Kind.DGRAD, Kind.WGRAD, Kind.ROW_WGRAD, Kind.NORM_GRAD)
)


def _run(cost, order, *, chain=(Part(Role.ATTENTION),), sub_batches=2, filler=Filler(), **changes):
    layout = Layout(chain=chain, sub_batches=sub_batches)
    sizes = (1,) * sub_batches
    stage = StageSimulator(cost, workload(micro_batch=sub_batches, **changes), layout, sizes, filler, record=True)
    return stage.run(order)


def _lists(chain=(Part(Role.ATTENTION),), sub_batches=2):
    return build_oases_schedule(Layout(chain=chain, sub_batches=sub_batches))


def _times(result, lane="compute"):
    return {span.name: (span.start_ms, span.end_ms) for span in result.spans if span.lane == lane}


def test_one_block_two_sub_batches():
    result = _run(TableCost(collective_ms_per_kib=6.0), _lists().forward)
    assert _times(result) == {
        "forward(0,0)": (0, 10),
        "forward(0,1)": (10, 20),
        "join(0,0)": (20, 21),
        "join(0,1)": (26, 27),  # waits for the second all-reduce
    }
    assert _times(result, "communication") == {"reduce(0,0)": (10, 16), "reduce(0,1)": (20, 26)}
    assert (result.elapsed_ms, result.compute_ms, result.communication_ms, result.exposed_ms) == (27, 22, 12, 5)


def test_collectives_queue_on_one_lane():
    result = _run(TableCost(collective_ms_per_kib=14.0), _lists().forward)
    assert _times(result, "communication") == {"reduce(0,0)": (10, 24), "reduce(0,1)": (24, 38)}
    assert _times(result)["join(0,0)"] == (24, 25)
    assert _times(result)["join(0,1)"] == (38, 39)


def test_computation_and_communication_slow_each_other_down():
    cost = TableCost(collective_ms_per_kib=6.0, between=Contention(compute=1.5, communication=2.0))
    result = _run(cost, _lists().forward)
    # The all-reduce takes 12 beside forward(0,1), which gets 8 of its 10 done meanwhile.
    assert _times(result, "communication")["reduce(0,0)"] == (10, 22)
    assert _times(result)["forward(0,1)"] == pytest.approx((10, 24))
    # join(0,0) takes 1.5 beside the second one, which gets 0.75 of its 6 done; alone it needs the other 5.25.
    assert _times(result)["join(0,0)"] == pytest.approx((24, 25.5))
    assert _times(result, "communication")["reduce(0,1)"] == pytest.approx((24, 30.75))
    assert result.elapsed_ms == pytest.approx(31.75)
    assert (result.compute_ms, result.communication_ms) == (22, 12)


def test_waits_are_filled_with_weight_gradients():
    lists, cost = _lists(), TableCost(collective_ms_per_kib=30.0)
    in_place = _run(cost, lists.backward)
    filled = _run(cost, lists.backward, filler=Filler(max_postponed_wgrads=8))
    # In place: DGRADs until 20, weight gradients until 40, all-reduces from 10 to 40 and 40 to 70; joins at 40 and 70.
    assert _times(in_place)["norm_grad(0,0)"] == (40, 41)
    assert in_place.elapsed_ms == 71
    assert filled.elapsed_ms == 71, "nothing else is there to fill with"
    assert [span.name for span in filled.spans if span.lane == "compute"][2:6] == [
        "wgrad(0,0)",
        "row_wgrad(0,0)",
        "wgrad(0,1)",
        "row_wgrad(0,1)",
    ]


CHAIN = (
    Part(Role.EMBEDDING),
    *(Part(role, recomputed=True) for _ in range(3) for role in (Role.ATTENTION, Role.MLP)),
    Part(Role.HEAD),
)


@pytest.mark.parametrize("name", ["forward", "backward", "steady"])
@pytest.mark.parametrize("filler", [Filler(), Filler(max_postponed_wgrads=3, max_recomputes_ahead=2)])
@pytest.mark.parametrize("collective_ms", [0.5, 9.0, 40.0])
def test_the_order_is_the_walk_of_the_list(name, filler, collective_ms):
    """Asked again with what the simulated clock has seen, `walk` gives the same order as the simulation ran."""
    order = getattr(_lists(CHAIN), name)
    result = _run(TableCost(collective_ms_per_kib=collective_ms), order, chain=CHAIN, filler=filler)
    computed = [span for span in result.spans if span.lane == "compute"]
    ended_ms = {span.operation: span.end_ms for span in result.spans if span.lane == "communication"}
    now_ms = 0.0
    end_ms = {span.operation: span.end_ms for span in computed}
    walked = []
    for operation in walk(
        order,
        filler,
        may_move=lambda op: not op.kind.is_weight_gradient or CHAIN[op.place].is_block,
        has_ended=lambda collective: ended_ms[collective] <= now_ms,
    ):
        walked.append(operation)
        now_ms = end_ms.get(operation, now_ms)
    assert [op for op in walked if not op.kind.is_communication] == [span.operation for span in computed]
    started = sorted(ended_ms, key=ended_ms.get)
    assert [op for op in started if op.kind.is_communication] == collectives(order)


def test_filling_waits_gains_time():
    order = _lists(CHAIN).backward
    cost = TableCost(collective_ms_per_kib=25.0)
    plain = _run(cost, order, chain=CHAIN)
    filled = _run(cost, order, chain=CHAIN, filler=Filler(max_postponed_wgrads=8, max_recomputes_ahead=4))
    assert filled.compute_ms == plain.compute_ms
    assert filled.elapsed_ms < plain.elapsed_ms


def test_the_loss_has_three_small_all_reduces_inside():
    cost = TableCost(collective_ms_per_kib=16.0)
    result = _run(cost, _lists(CHAIN).forward, chain=CHAIN)
    inside = [span for span in result.spans if span.name.endswith("inside")]
    # [16, 2] in fp32 is 1/8 KiB.
    assert [span.end_ms - span.start_ms for span in inside] == pytest.approx([2.0] * 3)
    assert inside[-1].end_ms == pytest.approx(result.elapsed_ms)


def test_degree_1_communicates_nothing():
    cost = TableCost(collective_ms_per_kib=6.0)
    prediction = Simulator(cost).predict(workload(tensor=1, recompute="full"), System())
    assert prediction.communication_ms == prediction.exposed_ms == 0
    assert prediction.hidden is None
    assert prediction.iteration_ms == pytest.approx(2 * 2 * (BLOCK_FORWARD_MS + BLOCK_BACKWARD_MS))


def test_megatron_waits_for_every_collective_but_behind_a_weight_gradient():
    cost = TableCost(collective_ms_per_kib=2.0)
    prediction = Simulator(cost).predict(workload(recompute="full"), System(schedule="vanilla"))
    blocks, samples, all_reduce_ms, loss_ms = 2, 2, 4.0, 3 * 2 * 16 * 2 * 4 / 1024
    compute_ms = samples * blocks * (2 * BLOCK_FORWARD_MS + BLOCK_BACKWARD_MS)
    assert prediction.compute_ms == pytest.approx(compute_ms)
    # Embedding and its like, two a block, one more a block in recomputation, and the head's gradient.
    assert prediction.communication_ms == pytest.approx((1 + 3 * blocks + 1) * all_reduce_ms + loss_ms)
    # A block's gradient takes 4 and hides behind a weight gradient of 10; the head's weight gradient takes no time.
    assert prediction.exposed_ms == pytest.approx((1 + 2 * blocks + 1) * all_reduce_ms + loss_ms)


def test_pieces_overlap_with_the_gemm_that_feeds_them():
    layout = System(schedule="wang").ordering.layout(
        (Part(Role.ATTENTION),), sub_batches=1, pieces=2, sequence_parallel=False
    )
    schedule = System(schedule="wang").build(layout)
    trained = workload(micro_batch=1, pieces=2)
    stage = StageSimulator(TableCost(collective_ms_per_kib=6.0), trained, layout, (1,), Filler(), record=True)
    forward, backward = stage.run(schedule.forward), stage.run(schedule.backward)
    # All but the row-parallel GEMM takes 8, each half of it 1, each half of the all-reduce 3.
    assert _times(forward) == {
        "forward(0,0)": (0, 8), "row(0,0)": (8, 9), "row(0,1)": (9, 10), "join(0,0)": (15, 16)
    }  # fmt: skip
    assert _times(forward, "communication") == {"reduce(0,0)": (9, 12), "reduce(0,1)": (12, 15)}
    assert _times(backward)["dgrad(0,0)"] == (0, 8)
    assert _times(backward, "communication")["reduce_grad(0,0)"][0] == 8 + BLOCK_MS[Kind.ROW_WGRAD] + 1
    assert backward.compute_ms == BLOCK_BACKWARD_MS, "decomposed or not"


@pytest.mark.parametrize("changes", [{}, {"recompute": "full"}, {"micro_batches": 2}], ids=str)
def test_one_piece_is_megatrons_order(changes):
    cost = TableCost(collective_ms_per_kib=6.0)
    of = {name: Simulator(cost).predict(workload(**changes), System(schedule=name)) for name in ("vanilla", "wang")}
    assert of["wang"].iteration_ms == of["vanilla"].iteration_ms
    decomposed = Simulator(cost).predict(workload(pieces=4, **changes), System(schedule="wang"))
    assert decomposed.iteration_ms < of["vanilla"].iteration_ms
    assert decomposed.communication_ms == pytest.approx(of["vanilla"].communication_ms)


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_what_overlaps_more_is_faster(recompute):
    trained, cost = workload(shape(layers=4), recompute=recompute, pieces=4), TableCost(collective_ms_per_kib=8.0)
    order = ("vanilla", "wang", "merak", "oases")
    times_ms = [Simulator(cost).predict(trained, System(schedule=name)).iteration_ms for name in order]
    assert times_ms == sorted(times_ms, reverse=True) and len(set(times_ms)) == len(order)


def test_blocks_of_their_own_degree():
    cost = TableCost(collective_ms_per_kib=6.0, data_ms_per_kib=3.0)
    trained = workload(tensor=2, micro_batch=4, degrees=(1, 2))
    result = Simulator(cost).predict(trained, System(), record=True)
    took_ms = {span.name: pytest.approx(span.end_ms - span.start_ms) for span in result.timeline}
    # Sub-batches of 2 samples. The attention's sub-groups of one rank have one sample each, and nothing to reduce.
    assert (took_ms["forward(1,0)"], took_ms["dgrad(1,0)"]) == (10, 10)
    assert (took_ms["forward(2,0)"], took_ms["reduce(2,0)"], took_ms["reduce_grad(2,0)"]) == (20, 12, 12)
    assert not {"reduce(1,0)", "reduce_grad(1,0)", "reshard(1,0)", "reshard_grad(2,0)"} & took_ms.keys()
    # The MLP gathers what its attention has, and the embedding the gradient.
    assert (took_ms["reshard(2,0)"], took_ms["reshard_grad(1,0)"]) == (12, 12)
    # The copies' gradients are summed once all are there.
    copies_bytes = 4 * trained.model.parameters(Role.ATTENTION, degree=1)
    assert took_ms["sum gradients of sub-groups"] == 6.0 * copies_bytes / 1024


def test_between_degrees_without_and_with_sequence_parallelism():
    for before, after, group, share in (
        (4, 1, Group(4, stride=2), 1),  # of 8 ranks: degree 2 to 8
        (4, 2, Group(2, stride=2), 2),
        (2, 1, Group(2, stride=4), 1),
        (3, 2, Group(3, stride=4), 1),  # of 12: neither divides the other
    ):
        plain = workload(tensor=12 if before == 3 else 8)
        step = Redistribution(before, after)
        assert (step.group(plain), step.received_bytes(plain, 12)) == (group, 12 * 1024 // share)
        if before % after == 0:
            assert step.reversed().group(plain).size == 1 and step.reversed().received_bytes(plain, 12) == 0
        split = workload(tensor=plain.tensor, sequence_parallel=True)
        assert step.group(split) == step.reversed().group(split)
        assert step.received_bytes(split, 12) == 12 * 1024 // plain.tensor
    assert Redistribution(4, 1).group(workload(tensor=8, sequence_parallel=True)) == Group(4, stride=2)


@pytest.mark.parametrize("system", [System(schedule="vanilla"), System()])
@pytest.mark.parametrize("changes", [{}, dict(pipeline=2), dict(sequence_parallel=True), dict(recompute="full")])
def test_a_degree_for_every_block_that_is_t_changes_nothing(system, changes):
    cost = TableCost(collective_ms_per_kib=3.0, data_ms_per_kib=0.1, between=Contention(compute=1.2, communication=1.1))
    plain = workload(shape(layers=4), **changes)
    same = dataclasses.replace(plain, degrees=(2,) * 8)
    assert Simulator(cost).predict(same, system) == Simulator(cost).predict(plain, system)


def test_uneven_sub_batches():
    result = Simulator(TableCost()).predict(workload(micro_batch=3), System(), record=True)
    forward = {span.name: span.end_ms - span.start_ms for span in result.timeline if span.name.startswith("forward(1")}
    assert forward == pytest.approx({"forward(1,0)": 20.0, "forward(1,1)": 10.0})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_bubble_of_1f1b(stages, micro_batches):
    """(stages - 1) / micro_batches of the time that a stage computes, with stages that take equally long."""
    cost = TableCost()
    trained = workload(shape(layers=4), pipeline=stages, micro_batches=micro_batches)
    for system in (System(schedule="vanilla"), System()):
        prediction = Simulator(cost).predict(trained, system)
        one_ms = 2 * 2 * 4 // stages * (BLOCK_FORWARD_MS + BLOCK_BACKWARD_MS)
        assert prediction.iteration_ms == pytest.approx((micro_batches + stages - 1) * one_ms)
        for stage in prediction.stages:
            assert stage.pipeline_ms == pytest.approx((stages - 1) * one_ms)
            assert stage.compute_ms == pytest.approx(micro_batches * one_ms)


def test_sends_lengthen_a_pipeline():
    trained = workload(shape(layers=2), pipeline=2, micro_batches=1)
    slow, quick = (Simulator(TableCost(send_ms=send)).predict(trained, System()).iteration_ms for send in (3.0, 0.0))
    assert slow - quick == pytest.approx(2 * 3.0)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("last_apart", [False, True])
def test_backward_passes_are_put_off_as_in_a_run(micro_batches, last_apart):
    from megatron.oases.runtime.interleaving import Interleaving

    interleaving = Interleaving(lambda: micro_batches, last_apart=last_apart)
    tapes = [object() for _ in range(micro_batches)]
    expected = []
    for m, tape in enumerate(tapes):
        put_off = interleaving.begin(tape)
        expected.append(("forward", (m,)) if put_off is None else ("steady", (tapes.index(put_off), m)))
        if not interleaving.puts_off(tape):
            expected.append(("backward", (m,)))
    steps = list(single_stage_steps(micro_batches, interleaves=True, last_apart=last_apart))
    assert [(step.name, step.micro_batches) for step in steps] == expected
    assert [step.begins for step in steps] == [True] + [False] * (len(steps) - 1)
    assert [step.ends for step in steps] == [False] * (len(steps) - 1) + [True]


def test_interleaving_gains_time_where_communication_is_slow():
    trained = workload(shape(layers=3), micro_batches=4, recompute="full", micro_batch=4)
    cost = TableCost(collective_ms_per_kib=12.0)
    together = Simulator(cost).predict(trained, System())
    apart = Simulator(cost).predict(trained, System(without=frozenset({Idea.INTERLEAVE})))
    assert together.iteration_ms < apart.iteration_ms
    assert together.compute_ms == apart.compute_ms


BIG = shape(layers=4, hidden_size=4096, ffn_hidden_size=16384, head_size=1024, padded_vocabulary=1024)


def test_gradients_are_reduced_beside_the_last_backward_pass():
    cost = TableCost(data_ms_per_kib=2e-5)
    alone, overlapped = (
        Simulator(cost).predict(workload(BIG, data=2, overlap_grad_reduce=overlaps), System(host_sees_completion=False))
        for overlaps in (False, True)
    )
    assert alone.busiest.data_parallel_ms > 10
    assert alone.iteration_ms == pytest.approx(alone.compute_ms + alone.busiest.data_parallel_ms)
    assert 0 < overlapped.busiest.data_parallel_ms < alone.busiest.data_parallel_ms
    assert overlapped.communication_ms == pytest.approx(alone.communication_ms)


def test_parameters_are_gathered_beside_the_first_forward_pass():
    cost = TableCost(data_ms_per_kib=2e-5)
    sharded = dict(data=2, distributed_optimizer=True, overlap_grad_reduce=True)
    apart, beside = (
        Simulator(cost).predict(workload(BIG, overlap_param_gather=overlaps, **sharded), System())
        for overlaps in (False, True)
    )
    assert beside.communication_ms == pytest.approx(apart.communication_ms)
    assert beside.iteration_ms < apart.iteration_ms


def test_optimizer_and_overhead_come_on_top():
    cost = TableCost(optimizer_ms_per_parameter=1e-3, overhead_ms=7.0)
    plain, full = (Simulator(each).predict(workload(), System()) for each in (TableCost(), cost))
    model = shape()
    parameters = sum(model.parameters(role, degree=2) for role in Role)
    assert full.iteration_ms - plain.iteration_ms == pytest.approx(7.0 + parameters * 1e-3)


@pytest.mark.parametrize("system", [System(schedule="vanilla"), System()])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(pipeline=2),
        dict(data=2),
        dict(sequence_parallel=True),
        dict(micro_batches=3),
        dict(pipeline=2, tensor=4, micro_batch=8, degrees=(1, 2, 4, 1)),
        dict(data=2, tensor=4, micro_batch=8, degrees=(1, 2, 4, 1), overlap_grad_reduce=True),
        dict(sequence_parallel=True, tensor=4, micro_batch=8, degrees=(1, 2, 4, 1)),
    ],
)
def test_the_parts_of_every_stage_add_up(system, changes):
    cost = TableCost(
        collective_ms_per_kib=5.0, data_ms_per_kib=0.1, send_ms=2.0, between=Contention(compute=1.2, communication=1.1)
    )
    trained = workload(shape(layers=2), recompute="full", **changes)
    prediction = Simulator(cost).predict(trained, system, record=True)
    for stage in prediction.stages:
        assert stage.iteration_ms == pytest.approx(prediction.iteration_ms)
        assert stage.pipeline_ms >= -1e-9
    assert max(span.end_ms for span in prediction.timeline) <= prediction.iteration_ms + 1e-9
    assert Simulator(cost).predict(trained, system).iteration_ms == prediction.iteration_ms
