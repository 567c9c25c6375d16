"""What fills a wait, told by a script instead of a network."""

import pytest

from megatron.oases.schedule import Filler, Kind, Layout, Part, Role, build_oases_schedule, collectives, walk

LAYER = (Part(Role.ATTENTION, recomputed=True), Part(Role.MLP, recomputed=True))
CHAIN = (Part(Role.EMBEDDING), *LAYER, *LAYER, Part(Role.HEAD))


def _order(sequence_parallel=False, name="backward"):
    layout = Layout(chain=CHAIN, sub_batches=2, sequence_parallel=sequence_parallel)
    return layout, getattr(build_oases_schedule(layout), name)


def _walk(order, filler, *, ended, may_move=lambda operation: True):
    return list(walk(order, filler, may_move=may_move, has_ended=lambda collective: ended))


GENEROUS = Filler(max_postponed_wgrads=100, max_recomputes_ahead=100)


@pytest.mark.parametrize("name", ["forward", "backward", "steady"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("filler", [Filler(), Filler(max_postponed_wgrads=3, max_recomputes_ahead=2), GENEROUS])
def test_runs_everything_once_after_what_it_depends_on(filler, ended, sequence_parallel, name):
    layout, order = _order(sequence_parallel, name)
    walked = _walk(order, filler, ended=ended)
    assert sorted(map(str, walked)) == sorted(map(str, order))
    assert collectives(walked) == collectives(order)
    done = set()
    for operation in walked:
        assert done.issuperset(layout.dependencies(operation)), operation
        done.add(operation)


def _without_weight_gradients(order):
    return [op for op in order if not op.kind.is_weight_gradient]


def test_without_waits_only_weight_gradients_move():
    _, order = _order()
    walked = _walk(order, GENEROUS, ended=True)
    assert _without_weight_gradients(walked) == _without_weight_gradients(order)
    count = len(order) - len(_without_weight_gradients(order))
    assert all(op.kind.is_weight_gradient for op in walked[-count:]), "nothing waited, so they all come last"


def test_a_wait_is_filled_with_weight_gradients_first_and_then_with_recomputation():
    _, order = _order()
    walked = _walk(order, GENEROUS, ended=False)
    kinds = [operation.kind for operation in walked]
    filled = kinds[: kinds.index(Kind.NORM_GRAD)]
    assert filled.count(Kind.RECOMPUTE) == 8, "all recomputation ran ahead in the first wait"
    assert filled.index(Kind.WGRAD) < len(filled) - filled[::-1].index(Kind.RECOMPUTE)


@pytest.mark.parametrize("ended, postponed, ahead", [(True, 2, 0), (False, 1, 3)])
def test_limits(ended, postponed, ahead):
    _, order = _order()
    walked = _walk(order, Filler(max_postponed_wgrads=2, max_recomputes_ahead=3), ended=ended)
    most_postponed = most_ahead = 0
    for now, operation in enumerate(walked):
        if operation.kind.is_weight_gradient or operation.kind is Kind.RECOMPUTE:
            continue
        due, run = set(order[: order.index(operation)]), set(walked[:now])
        most_postponed = max(most_postponed, sum(op.kind.is_weight_gradient for op in due - run))
        most_ahead = max(most_ahead, sum(op.kind is Kind.RECOMPUTE for op in run - due))
    assert (most_postponed, most_ahead) == (postponed, ahead)


def test_what_may_not_move_stays():
    _, order = _order()
    assert _walk(order, GENEROUS, ended=False, may_move=lambda operation: False) == list(order)


def test_recomputation_waits_for_what_it_gathers():
    """With sequence parallelism RECOMPUTE is no filler before its all-gather was started and has ended."""
    _, order = _order(sequence_parallel=True)
    walked = _walk(order, Filler(max_recomputes_ahead=100), ended=False)
    assert [op for op in walked if op.kind is Kind.RECOMPUTE] == [op for op in order if op.kind is Kind.RECOMPUTE]
    assert walked == list(order)
