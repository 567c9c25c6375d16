"""Which plans the planner's choice is measured against, and what is said of it."""

import json
from dataclasses import replace

import pytest

from megatron.oases.cost.prediction import FlagParser
from megatron.oases.cost.sources import cluster_source
from megatron.oases.plan import read_plan
from megatron.oases.report.plan_validation import (
    RANKS,
    PlanValidation,
    PlanWorkload,
    contenders,
    plan_validation_table,
)
from megatron.oases.report.runs import Run

WORKLOAD = PlanWorkload(name="small", nic_gbps=1, changes="--num-layers 2 --hidden-size 256")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The contenders of a workload, by its memory."""

    def find(memory_gib=None):
        folder = tmp_path_factory.mktemp("plans")
        source = cluster_source("rtx3090x4")
        return contenders(replace(WORKLOAD, memory_gib=memory_gib), source, FlagParser(), folder)

    return find


def _degrees(contender):
    return [block.degree for block in contender.plan.blocks]


def test_the_choice_every_degree_and_three_plans_drawn_at_random(found):
    competing = found()
    by_name = {each.name: each for each in competing}
    assert [name for name in by_name if "all" not in name] == ["chosen", "random 1", "random 2", "random 3"]
    for degree in (1, 2, 4):  # the choice may be one of them
        assert set(_degrees(by_name.get(f"all {degree}", by_name["chosen"]))) == {degree}
    assert competing[0].predicted_ms == min(each.predicted_ms for each in competing)
    drawn = [each.plan.layers for each in competing if each.name.startswith("random")]
    assert len(set(drawn)) == 3
    assert any(len({block.degree for layer in layers for block in (layer.attention, layer.mlp)}) > 1 for layers in drawn)
    for each in competing:
        assert read_plan(each.path) == each.plan
        assert each.plan.tensor == RANKS
    assert [each.plan.layers for each in found()] == [each.plan.layers for each in competing], "the same ones every time"


def test_all_of_them_fit(found):
    free = {each.name: each.plan.predicted for each in found() if each.plan.predicted}
    enough = sorted(predicted.memory_bytes for predicted in free.values())[0] * 0.9 / 2**30
    limited = [each for each in found(enough) if each.plan.predicted]
    assert limited
    assert all(each.plan.predicted.memory_bytes <= enough * 2**30 for each in limited)


def test_what_is_said_of_them(found):
    competing = found()[:2]
    runs = tuple(
        Run(
            system=each.name,
            round_number=round_number,
            iterations_ms=(900.0, 900.0, 90.0 + 20 * place, 110.0 + 20 * place),
            losses=(),
            tokens_per_iteration=1,
        )
        for round_number in (1, 2)
        for place, each in zip((1, 0), competing)
    )
    validation = PlanValidation(workload=WORKLOAD, contenders=tuple(competing), runs=runs)
    assert validation.chosen_over_best == pytest.approx(120 / 100)
    said = json.loads(json.dumps(validation.to_json()))
    assert said["plans"]["chosen"]["rounds_ms"] == [120, 120]
    assert said["plans"][competing[1].name]["measured_ms"] == 100
    assert "1.200 times" in plan_validation_table(validation).caption
