"""Orders are legal and hide what they promise to hide; the validator refuses what is not."""

import dataclasses

import pytest

from megatron.oases.schedule import Kind, Operation, ScheduleError, build_oases_schedule, validate

SHAPES = [(blocks, sub_batches) for blocks in (1, 2, 7) for sub_batches in (1, 2, 3)]


def _recompute(blocks: int, pattern: str) -> list[bool]:
    return {"all": [True] * blocks, "none": [False] * blocks, "some": [k % 3 == 0 for k in range(blocks)]}[pattern]


@pytest.mark.parametrize("pattern", ["all", "none", "some"])
@pytest.mark.parametrize("blocks, sub_batches", SHAPES)
def test_oases_is_legal(blocks, sub_batches, pattern):
    validate(build_oases_schedule(recompute=_recompute(blocks, pattern), sub_batches=sub_batches))


@pytest.mark.parametrize("pattern", ["all", "none"])
def test_two_collectives_a_block_whatever_is_recomputed(pattern):
    schedule = build_oases_schedule(recompute=_recompute(6, pattern), sub_batches=2)
    assert len(schedule.collectives) == 2 * 6 * 2


def test_every_collective_has_computation_of_another_sub_batch_behind_it():
    schedule = build_oases_schedule(recompute=[True] * 6, sub_batches=2)
    for order in (schedule.forward, schedule.backward):
        for started, operation in enumerate(order):
            if not operation.kind.is_communication:
                continue
            awaited = Kind.JOIN if operation.kind is Kind.REDUCE else Kind.NORM_GRAD
            waits = order.index(Operation(awaited, operation.block, operation.sub_batch))
            between = order[started + 1 : waits]
            is_last = operation.block == (5 if operation.kind is Kind.REDUCE else 0) and operation.sub_batch == 1
            hides = any(
                op.sub_batch != operation.sub_batch and op.kind in (Kind.FORWARD, Kind.DGRAD) for op in between
            )
            assert hides or is_last, f"nothing hides {operation}"


def test_recomputation_stands_before_the_wait_it_hides():
    order = build_oases_schedule(recompute=[True] * 4, sub_batches=2).backward
    for block in range(3):
        for i in range(2):
            assert order.index(Operation(Kind.RECOMPUTE, block, i)) < order.index(
                Operation(Kind.NORM_GRAD, block + 1, i)
            )


def test_digest_tells_orders_apart():
    one = build_oases_schedule(recompute=[True, True], sub_batches=2)
    other = build_oases_schedule(recompute=[True, False], sub_batches=2)
    assert one.digest() == build_oases_schedule(recompute=[True, True], sub_batches=2).digest()
    assert one.digest() != other.digest()


def _with(name, change):
    schedule = build_oases_schedule(recompute=[True] * 2, sub_batches=2)
    order = list(getattr(schedule, name))
    change(order)
    return dataclasses.replace(schedule, **{name: tuple(order)})


def _swap(order):
    place = order.index(Operation(Kind.JOIN, 0, 0))
    order[place], order[place + 1] = order[place + 1], order[place]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("forward", _swap, r"forward\(1,0\) comes before join\(0,0\) in the forward pass: .*>>forward\(1,0\)<<"),
        ("forward", lambda order: order.pop(), r"missing in the forward pass: join\(1,1\)"),
        ("backward", lambda order: order.append(order[-1]), r"norm_grad\(0,1\) stands 2 times"),
        ("backward", lambda order: order.append(Operation(Kind.JOIN, 0, 0)), r"join\(0,0\) does not belong"),
        ("backward", lambda order: order.append(Operation(Kind.DGRAD, 2, 0)), r"dgrad\(2,0\) does not belong"),
        ("backward", lambda order: order.reverse(), r"comes before"),
    ],
)
def test_validator_refuses(name, change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(_with(name, change))


def test_recompute_has_one_entry_a_block():
    schedule = build_oases_schedule(recompute=[True] * 2, sub_batches=2)
    with pytest.raises(ScheduleError, match="2 blocks, but recompute has 1 entries"):
        validate(dataclasses.replace(schedule, recompute=(True,)))


@pytest.mark.parametrize("arguments", [dict(recompute=[], sub_batches=2), dict(recompute=[True], sub_batches=0)])
def test_builder_refuses_nothing_to_do(arguments):
    with pytest.raises(ValueError):
        build_oases_schedule(**arguments)
