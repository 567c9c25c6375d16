"""Orders are legal and hide what they promise to hide; the validator refuses what is not."""

import dataclasses

import pytest

from megatron.oases.schedule import (
    Idea,
    Kind,
    Layout,
    Operation,
    Part,
    Role,
    ScheduleError,
    build_chain,
    build_domino_schedule,
    build_megatron_schedule,
    build_merak_schedule,
    build_oases_schedule,
    build_wang_schedule,
    collectives,
    enclose,
    validate,
)

E, H = Part(Role.EMBEDDING), Part(Role.HEAD)
A, M = Part(Role.ATTENTION), Part(Role.MLP)
RA, RM = Part(Role.ATTENTION, recomputed=True), Part(Role.MLP, recomputed=True)


def _half(part, sub_groups):
    return dataclasses.replace(part, sub_groups=sub_groups)


CHAINS = {
    "one block": [A],
    "middle stage": [RA, RM, A, M],
    "first stage": [E, A, RM],
    "last stage": [RA, RM, A, M, H],
    "whole": [E, RA, RM, RA, RM, H],
    # Where the number of sub-groups changes: at the ends, inside a layer, between 2 and 3.
    "sub-groups": [E, _half(RA, 2), RM, A, _half(RM, 4), _half(RA, 2), _half(RM, 2), H],
    "stage that ends with recomputed sub-groups": [_half(RA, 2), _half(RM, 2), Part(Role.EXIT)],
    "middle stage with sub-groups": [_half(RA, 2), _half(RM, 3), _half(A, 3), _half(M, 2), Part(Role.EXIT)],
    "first stage with sub-groups": [E, RA, _half(RM, 2), Part(Role.EXIT)],
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
    order = _build([RA, RM], along_sequence=True).backward
    assert order.index(Operation(Kind.DGRAD, 1, 1)) < order.index(Operation(Kind.DGRAD, 1, 0))
    assert order.index(Operation(Kind.RECOMPUTE, 1, 0)) < order.index(Operation(Kind.RECOMPUTE, 1, 1))
    with pytest.raises(ValueError, match="split over the ranks already"):
        _build([RA], sequence_parallel=True, along_sequence=True)


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
        order = _build([RA, RM], without=without).backward
        reduce, *weights = (order.index(Operation(k, 1, 0)) for k in (Kind.REDUCE_GRAD, Kind.WGRAD, Kind.ROW_WGRAD))
        assert all((weight - reduce) * sign > 0 for weight in weights)


@pytest.mark.parametrize("layer", [[A, M], [RA, RM]])
def test_two_collectives_a_block_whether_it_is_recomputed_or_not(layer):
    schedule = _build(layer * 3, 2)
    assert len(collectives(schedule.forward)) == len(collectives(schedule.backward)) == 6 * 2
    assert len(collectives(schedule.steady)) == 2 * 6 * 2


def test_every_collective_has_computation_of_another_sub_batch_behind_it():
    schedule = _build([RA, RM] * 3, 2)
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
    order = _build([RA, RM] * 2, 2).backward
    for place in range(3):
        for i in range(2):
            wait = Operation(Kind.NORM_GRAD, place + 1, i)
            assert order.index(Operation(Kind.RECOMPUTE, place, i)) < order.index(wait)


def test_steady_list_takes_turns_between_the_passes():
    order = _build(CHAINS["whole"], 2).steady
    turns = [operation.micro_batch for operation in collectives(order)]
    assert turns == [0, 1] * (len(turns) // 2)
    assert order[-1].kind is Kind.LOSS, "its small collectives come when no large one is in the way"


def _repeating(chain, sub_batches=1, sequence_parallel=False, pieces=1):
    return Layout(
        pieces=pieces,
        chain=tuple(chain),
        sub_batches=sub_batches,
        sequence_parallel=sequence_parallel,
        recomputes_row_parallel=True,
        repeats_collectives=True,
    )


def _build_megatron(chain, sequence_parallel=False):
    return build_megatron_schedule(_repeating(chain, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [name for name in CHAINS if name != "one block"])
def test_megatron_is_legal(name, sequence_parallel):
    validate(_build_megatron(CHAINS[name], sequence_parallel))


def test_megatron_repeats_the_collectives_of_a_layer_and_hides_only_a_weight_gradient():
    order = _build_megatron(CHAINS["whole"]).backward
    assert [str(op) for op in order if op.place in (3, 4)] == [
        *("recompute(3,0)", "rereduce(3,0)", "rejoin(3,0)", "recompute(4,0)", "rereduce(4,0)", "rejoin(4,0)"),
        *("dgrad(4,0)", "row_wgrad(4,0)", "reduce_grad(4,0)", "wgrad(4,0)", "norm_grad(4,0)"),
        *("dgrad(3,0)", "row_wgrad(3,0)", "reduce_grad(3,0)", "wgrad(3,0)", "norm_grad(3,0)"),
    ]
    with pytest.raises(ValueError, match="does not cut micro-batches"):
        build_megatron_schedule(Layout(chain=(A, M), sub_batches=2))


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in CHAINS if name != "one block"])
def test_wang_is_legal(name, pieces):
    validate(build_wang_schedule(_repeating(CHAINS[name], pieces=pieces)))


def test_wang_sends_each_piece_while_it_computes_the_next():
    layout = _repeating(CHAINS["whole"], pieces=2)
    schedule = build_wang_schedule(layout)
    assert [str(op) for op in schedule.forward if op.place < 2] == [
        *("forward(0,0)", "reduce(0,0)", "join(0,0)"),
        *("forward(1,0)", "row(1,0)", "reduce(1,0)", "row(1,1)", "reduce(1,1)", "join(1,0)"),
    ]
    assert [str(op) for op in schedule.backward if op.place == 4] == [
        *("recompute(4,0)", "rerow(4,0)", "rereduce(4,0)", "rerow(4,1)", "rereduce(4,1)", "rejoin(4,0)"),
        *("dgrad(4,0)", "row_wgrad(4,0)", "column_grad(4,0)", "reduce_grad(4,0)", "column_grad(4,1)", "reduce_grad(4,1)"),
        *("wgrad(4,0)", "norm_grad(4,0)"),
    ]
    join = Operation(Kind.JOIN, 1)
    assert layout.awaited(join) == (Operation(Kind.REDUCE, 1, 0), Operation(Kind.REDUCE, 1, 1))
    assert layout.awaited(Operation(Kind.JOIN, 0)) == (Operation(Kind.REDUCE, 0),)
    assert layout.awaited(Operation(Kind.FORWARD, 1)) == ()
    with pytest.raises(ValueError, match="pieces are those of a whole micro-batch"):
        _repeating(CHAINS["whole"], sub_batches=2, pieces=2)


@pytest.mark.parametrize("build", [build_merak_schedule, build_domino_schedule])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in CHAINS if name != "one block"])
def test_merak_and_domino_are_legal(name, sub_batches, sequence_parallel, build):
    validate(build(_repeating(CHAINS[name], sub_batches, sequence_parallel)))


def test_merak_overlaps_sub_batches_but_recomputes_a_layer_between_its_gradients():
    order = build_merak_schedule(_repeating(CHAINS["whole"], 2)).backward
    layer = [op for op in order if op.place in (1, 2)]
    assert [str(op) for op in layer[:12]] == [
        *("recompute(1,0)", "rereduce(1,0)", "recompute(1,1)", "rereduce(1,1)"),
        *("rejoin(1,0)", "recompute(2,0)", "rereduce(2,0)", "rejoin(1,1)", "recompute(2,1)", "rereduce(2,1)"),
        *("rejoin(2,0)", "rejoin(2,1)"),
    ]
    waits = [order.index(Operation(Kind.NORM_GRAD, 3, i)) for i in range(2)]
    assert max(waits) < order.index(layer[0]), "the layer above is through before this one is recomputed"
    assert len(collectives(order)) > len(collectives(_build(CHAINS["whole"]).backward))


@pytest.mark.parametrize("build, behind", [(build_merak_schedule, False), (build_domino_schedule, True)])
def test_where_the_row_parallel_weight_gradient_stands(build, behind):
    order = build(_repeating([A, M], 2)).backward
    reduce, row, column = (order.index(Operation(kind, 1, 0)) for kind in (Kind.REDUCE_GRAD, Kind.ROW_WGRAD, Kind.WGRAD))
    assert (row > reduce) is behind
    assert column > reduce
    with pytest.raises(ValueError, match="repeats the collectives"):
        build(Layout(chain=(A, M), sub_batches=2))


@pytest.mark.parametrize(
    "head, keeps_last_layer, recomputed_layers, expected",
    [
        (True, True, 3, [RA, RM, RA, RM, A, M, H]),
        (True, False, 3, [RA, RM, RA, RM, RA, RM, H]),
        (True, True, 1, [RA, RM, A, M, A, M, H]),  # the last one is kept already
        (False, True, 3, [RA, RM, RA, RM, RA, RM]),  # another stage's backward comes first
        (True, True, 0, [A, M, A, M, A, M, H]),
    ],
)
def test_which_layers_are_recomputed(head, keeps_last_layer, recomputed_layers, expected):
    chain = build_chain(
        layers=3,
        recomputed_layers=recomputed_layers,
        embedding=False,
        head=head,
        keeps_last_layer=keeps_last_layer,
    )
    assert list(chain) == expected


def test_what_is_never_recomputed_is_refused():
    with pytest.raises(ValueError, match="the head is never recomputed"):
        Part(Role.HEAD, recomputed=True)
    with pytest.raises(ValueError, match="the head has 2 sub-groups"):
        Part(Role.HEAD, sub_groups=2)
    with pytest.raises(ValueError, match="needs the output of the row-parallel GEMM"):
        Layout(chain=(RA, RM), sub_batches=1, repeats_collectives=True)


def test_what_becomes_smaller_is_sliced_and_only_what_grows_is_sent():
    layout = Layout(chain=(E, _half(RA, 2), RM, H), sub_batches=2)
    assert layout.forward_kinds(1)[:2] == (Kind.ENTER, Kind.FORWARD)
    assert layout.backward_kinds(1)[-3:] == (Kind.NORM_GRAD, Kind.RESHARD_GRAD, Kind.LEAVE)
    assert layout.forward_kinds(2)[:3] == (Kind.RESHARD, Kind.ENTER, Kind.FORWARD)
    assert layout.backward_kinds(2)[-2:] == (Kind.NORM_GRAD, Kind.LEAVE)
    assert not {Kind.ENTER, Kind.LEAVE} & {*layout.forward_kinds(3), *layout.backward_kinds(3)}
    along = dataclasses.replace(layout, sequence_parallel=True)  # then both directions exchange parts of the sequence
    assert along.forward_kinds(1)[:2] == along.forward_kinds(2)[:2] == (Kind.RESHARD, Kind.ENTER)
    assert along.backward_kinds(2)[-2:] == (Kind.RESHARD_GRAD, Kind.LEAVE)


def test_megatron_reshards_again_inside_a_recomputed_layer():
    order = _build_megatron([RA, _half(RM, 2), _half(A, 2), M, H]).backward
    assert [str(op) for op in order if op.kind in (Kind.REJOIN, Kind.RERESHARD, Kind.REENTER, Kind.RECOMPUTE)] == [
        *("recompute(0,0)", "rejoin(0,0)", "reenter(1,0)", "recompute(1,0)", "rejoin(1,0)")
    ]


def test_a_stage_hands_whole_micro_batches_on():
    assert enclose([A, _half(M, 2)], embedding=True, head=False) == (E, A, _half(M, 2), Part(Role.EXIT))
    assert enclose([A, _half(M, 2)], embedding=False, head=True)[-1] == H
    assert enclose([_half(A, 2), M], embedding=False, head=False)[-1] == M


def test_digest_tells_orders_apart():
    one = _build([RA, RM], 2)
    other = _build([RA, M], 2)
    assert one.digest() == _build([RA, RM], 2).digest()
    assert one.digest() != other.digest()
    assert _build([_half(RA, 2)]).digest() != _build([_half(RA, 4)]).digest()


def _with(name, change):
    schedule = _build([RA, RM], 2)
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
        ([A, E], 1, "the embedding stands at place 1 of 2"),
        ([H, A], 1, "the head stands at place 0 of 2"),
        ([E, H], 2, "at least one block"),
        ([A], 0, "sub_batches is 0"),
    ],
)
def test_layout_refuses(chain, sub_batches, message):
    with pytest.raises(ValueError, match=message):
        _build(chain, sub_batches)
