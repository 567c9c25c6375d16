"""A search over legal orders, on simulated costs of the emulated cluster, finds none that is faster than ours."""

import dataclasses
import math
import random

import pytest

from megatron.oases.cost.cluster_file import load_cluster
from megatron.oases.cost.roofline import RooflineCost
from megatron.oases.cost.simulator import StageSimulator
from megatron.oases.cost.system import System
from megatron.oases.schedule import Filler, Idea
from tests.unit.stand_in_cost import shape, workload

STEPS = 3000
MODEL = shape(
    layers=4, hidden_size=512, ffn_hidden_size=2048, heads=8, query_groups=8, head_size=64, sequence=256,
    padded_vocabulary=1024, stores_scores=False,
)  # fmt: skip


def _stage(*, nic_gbps, recompute, system, filler=None):
    cluster = load_cluster("emulated")
    nic = dataclasses.replace(cluster.links.nic, bandwidth_gbps=nic_gbps)
    cluster = dataclasses.replace(cluster, links=dataclasses.replace(cluster.links, nic=nic))
    trained = workload(MODEL, micro_batch=4, recompute=recompute)
    layout = system.layout(trained, 0)
    filler = system.filler(trained) if filler is None else filler
    stage = StageSimulator(
        RooflineCost(cluster, trained), trained, layout, system.sub_batch_sizes(trained), filler, record=False
    )
    return stage, layout, system.build(layout)


def _search(stage, layout, order, *, seed):
    """(ms of the order, of the best one found): simulated annealing; a step moves one operation, where that is legal."""
    chance = random.Random(seed)
    order = list(order)
    first = now = best = stage.run(order).elapsed_ms
    for step in range(STEPS):
        temperature = first * 0.004 * (1 - step / STEPS)
        source = chance.randrange(len(order))
        target = min(max(0, source + chance.randint(-12, 12)), len(order) - 1)
        changed = order[:source] + order[source + 1 :]
        changed.insert(target, order[source])
        if not _is_legal(layout, changed):
            continue
        ms = stage.run(changed).elapsed_ms
        if ms <= now or chance.random() < math.exp((now - ms) / temperature):
            order, now = changed, ms
            best = min(best, now)
    return first, best


def _is_legal(layout, order):
    done = set()
    for operation in order:
        if not done.issuperset(layout.dependencies(operation)):
            return False
        done.add(operation)
    return True


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("nic_gbps", [1, 0.5, 0.25])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_no_faster_order_is_found(nic_gbps, recompute, name):
    stage, layout, schedule = _stage(nic_gbps=nic_gbps, recompute=recompute, system=System())
    first, best = _search(stage, layout, getattr(schedule, name), seed=1)
    assert best > 0.999 * first


def test_the_search_finds_faster_orders_where_there_are_some():
    worse = System(without=frozenset({Idea.COLLECTIVE_FIRST, Idea.ENDS}))
    stage, layout, schedule = _stage(nic_gbps=0.5, recompute="full", system=worse, filler=Filler())
    first, best = _search(stage, layout, schedule.backward, seed=1)
    assert best < 0.97 * first
