"""Orders are legal and hide what they promise to hide; the validator refuses what is not."""

import dataclasses

import pytest

from megatron.oases.schedule import (
    Idea,
    Kind,
    Layout,
    Operation,
    Part,
    ScheduleError,
    build_oases_schedule,
    collectives,
    validate,
)

B, R = Part.BLOCK, Part.RECOMPUTED_BLOCK
CHAINS = {
    "one block": [B],
    "middle stage": [R, R, B, B],
    "first stage": [Part.EMBEDDING, R, B],
    "last stage": [R, B, R, B, Part.HEAD],
    "whole": [Part.EMBEDDING, R, R, R, R, Part.HEAD],
}


def _build(chain, sub_batches=2, sequence_parallel=False, without=(), along_sequence=False):
    layout = Layout(
        chain=tuple(chain),
        sub_batches=sub_batches,
        sequence_parallel=sequence_parallel,
        along_sequence=along_sequence,
    )
    return build_oases_schedule(layout, without=frozenset(without))


@pytest.mark.parametrize("without", [(), (Idea.ENDS,), (Idea.COLLECTIVE_FIRST, Idea.ENDS)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_oases_is_legal(name, sub_batches, sequence_parallel, without):
    validate(_build(CHAINS[name], sub_batches, sequence_parallel, without))


@pytest.mark.parametrize("without", [(), (Idea.COLLECTIVE_FIRST, Idea.ENDS)])
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_oases_along_the_sequence_is_legal(name, sub_batches, without):
    validate(_build(CHAINS[name], sub_batches, without=without, along_sequence=True))


def test_along_the_sequence_gradients_begin_with_the_last_chunk():
    order = _build([R, R], along_sequence=True).backward
    assert order.index(Operation(Kind.DGRAD, 1, 1)) < order.index(Operation(Kind.DGRAD, 1, 0))
    assert order.index(Operation(Kind.RECOMPUTE, 1, 0)) < order.index(Operation(Kind.RECOMPUTE, 1, 1))
    with pytest.raises(ValueError, match="split over the ranks already"):
        _build([R], sequence_parallel=True, along_sequence=True)


def test_ablation_of_the_ends_leaves_nothing_to_hide_their_collectives():
    order = _build(CHAINS["whole"], without=[Idea.ENDS])
    joins = [Operation(Kind.JOIN, 0, i) for i in range(2)]
    start = order.forward.index(joins[0])
    assert order.forward[start : start + 2] == tuple(joins)
    last = len(CHAINS["whole"]) - 1
    start = order.backward.index(Operation(Kind.NORM_GRAD, last, 0))
    assert order.backward[start + 1] == Operation(Kind.NORM_GRAD, last, 1)


def test_ablation_of_the_order_of_weight_gradients():
    for without, sign in (((), 1), ((Idea.COLLECTIVE_FIRST,), -1)):
        order = _build([R, R], without=without).backward
        places = [order.index(Operation(kind, 1, 0)) for kind in (Kind.REDUCE_GRAD, Kind.WGRAD)]
        assert (places[1] - places[0]) * sign > 0


@pytest.mark.parametrize("block", [B, R])
def test_two_collectives_a_block_whether_it_is_recomputed_or_not(block):
    schedule = _build([block] * 6, 2)
    assert len(collectives(schedule.forward)) == len(collectives(schedule.backward)) == 6 * 2
    assert len(collectives(schedule.steady)) == 2 * 6 * 2


def test_every_collective_has_computation_of_another_sub_batch_behind_it():
    schedule = _build([R] * 6, 2)
    for order in (schedule.forward, schedule.backward):
        for started, operation in enumerate(order):
            if not operation.kind.is_communication:
                continue
            awaited = Kind.JOIN if operation.kind is Kind.REDUCE else Kind.NORM_GRAD
            waits = order.index(Operation(awaited, operation.place, operation.sub_batch))
            between = order[started + 1 : waits]
            is_last = operation.place == (5 if operation.kind is Kind.REDUCE else 0) and operation.sub_batch == 1
            hides = any(
                op.sub_batch != operation.sub_batch and op.kind in (Kind.FORWARD, Kind.DGRAD) for op in between
            )
            assert hides or is_last, f"nothing hides {operation}"


def test_recomputation_stands_before_the_wait_it_hides():
    order = _build([R] * 4, 2).backward
    for place in range(3):
        for i in range(2):
            wait = Operation(Kind.NORM_GRAD, place + 1, i)
            assert order.index(Operation(Kind.RECOMPUTE, place, i)) < order.index(wait)


def test_steady_list_takes_turns_between_the_passes():
    order = _build(CHAINS["whole"], 2).steady
    turns = [operation.micro_batch for operation in collectives(order)]
    assert turns == [0, 1] * (len(turns) // 2)
    assert order[-1].kind is Kind.LOSS, "its small collectives come when no large one is in the way"


def test_digest_tells_orders_apart():
    one = _build([R, R], 2)
    other = _build([R, B], 2)
    assert one.digest() == _build([R, R], 2).digest()
    assert one.digest() != other.digest()


def _with(name, change):
    schedule = _build([R] * 2, 2)
    order = list(getattr(schedule, name))
    change(order)
    return dataclasses.replace(schedule, **{name: tuple(order)})


def _swap(order):
    place = order.index(Operation(Kind.JOIN, 0, 0))
    order[place], order[place + 1] = order[place + 1], order[place]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("forward", _swap, r"forward\(1,0\) comes before join\(0,0\) in the forward list: .*>>forward\(1,0\)<<"),
        ("forward", lambda order: order.pop(), r"missing in the forward list: join\(1,1\)"),
        ("backward", lambda order: order.append(order[-1]), r"norm_grad\(0,1\) stands 2 times"),
        ("backward", lambda order: order.append(Operation(Kind.JOIN, 0, 0)), r"join\(0,0\) does not belong"),
        ("backward", lambda order: order.append(Operation(Kind.DGRAD, 2, 0)), r"dgrad\(2,0\) does not belong"),
        ("steady", lambda order: order.remove(Operation(Kind.FORWARD, 0, 0, 1)), r"missing in the steady list: forward"),
        ("backward", lambda order: order.reverse(), r"comes before"),
    ],
)
def test_validator_refuses(name, change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(_with(name, change))


@pytest.mark.parametrize(
    "chain, sub_batches, message",
    [
        ([B, Part.EMBEDDING], 1, "the embedding stands at place 1 of 2"),
        ([Part.HEAD, B], 1, "the head stands at place 0 of 2"),
        ([Part.EMBEDDING, Part.HEAD], 2, "at least one block"),
        ([B], 0, "sub_batches is 0"),
    ],
)
def test_layout_refuses(chain, sub_batches, message):
    with pytest.raises(ValueError, match=message):
        _build(chain, sub_batches)
