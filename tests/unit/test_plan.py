"""plan/: the short form of degrees, and the plan file."""

import dataclasses
import json

import pytest

from megatron.oases.errors import UsageError
from megatron.oases.plan import (
    BlockPlan,
    LayerDegrees,
    LayerPlan,
    Plan,
    Predicted,
    Solver,
    format_degrees,
    parse_degrees,
    read_plan,
    write_plan,
)
from tests.unit.profiles import MODEL


@pytest.mark.parametrize(
    "text, degrees, shortest",
    [
        ("4x2,2x3", [(4, 4)] * 2 + [(2, 2)] * 3, "4x2,2x3"),
        ("4,2,2,4", [(4, 4), (2, 2), (2, 2), (4, 4)], "4,2x2,4"),
        ("4/2", [(4, 2)], "4/2"),
        ("4/2x2, 1/4", [(4, 2), (4, 2), (1, 4)], "4/2x2,1/4"),
        ("2/2,2", [(2, 2)] * 2, "2x2"),
    ],
)
def test_short_form(text, degrees, shortest):
    parsed = parse_degrees(text, layers=len(degrees))
    assert list(parsed) == [LayerDegrees(*each) for each in degrees]
    assert format_degrees(parsed) == shortest
    assert parse_degrees(shortest, layers=len(degrees)) == parsed


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "'' is not like 4, 4x8"),
        ("4,", "'' is not like"),
        ("4y2", "'4y2' is not like"),
        ("0x4", "'0x4' is not like"),
        ("4x0", "'4x0' is not like"),
        ("4/2/1", "'4/2/1' is not like"),
        ("-2x4", "'-2x4' is not like"),
        ("4x2,2", "names 2 + 1 = 3 layers, --num-layers is 4"),
        ("4", "names 1 layers, --num-layers is 4"),
        ("4x999999999999", "names 999999999999 layers, --num-layers is 4"),
    ],
)
def test_a_short_form_that_is_none_is_refused(text, said):
    with pytest.raises(UsageError) as refused:
        parse_degrees(text, layers=4)
    assert said in str(refused.value) and "--oases-degrees" in str(refused.value)


def plan(**changes) -> Plan:
    block = BlockPlan(degree=2, recomputed=True)
    fields = dict(
        version=1,
        model=MODEL,
        costs="cluster test",
        tensor=4,
        data=1,
        micro_batch=4,
        micro_batches=1,
        schedule="oases",
        sub_batches=2,
        layers=(LayerPlan(attention=block, mlp=block),) * MODEL.layers,
        predicted=Predicted(by="program", iteration_ms=1.5, exposed_ms=0.5, memory_bytes=10**9),
        solver=Solver(status="optimal", gap=0.0, seconds=0.1),
    )
    return Plan(**{**fields, **changes})


def test_written_and_read_again(tmp_path):
    file = tmp_path / "plan.json"
    write_plan(file, plan())
    assert read_plan(file) == plan()
    assert plan().short_form == f"2x{MODEL.layers}"


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda d: d["layers"][0]["mlp"].update(degree=3), "layers[0]: mlp: degree 3 does not divide tensor 4; legal are 1, 2, 4"),
        (lambda d: d["layers"][1]["attention"].update(degree=8), "layers[1]: attention: degree 8 does not divide"),
        (lambda d: d["layers"][0]["mlp"].update(degree=1), "4 sub-groups, among which micro_batch 4 in 2 sub_batches of 2 + 2 samples"),
        (lambda d: d["layers"].pop(), "layers are"),
        (lambda d: d.update(sub_batches=0), "sub_batches 0 must be at least 1"),
        (lambda d: d["layers"][0]["mlp"].update(degree="2"), "degree must be a whole number, not '2'"),
        (lambda d: d["layers"][0]["mlp"].pop("recomputed"), "recomputed is missing"),
        (lambda d: d.update(version=9), "version is 9; this tool reads version 1"),
        (lambda d: d.update(nonsense=9), "nonsense is unknown"),
    ],
)  # fmt: skip
def test_a_plan_edited_by_hand_is_checked(tmp_path, edit, said):
    file = tmp_path / "plan.json"
    write_plan(file, plan())
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError) as refused:
        read_plan(file)
    assert said in str(refused.value) and str(file) in str(refused.value)


def test_uneven_sub_batches_take_the_largest_degree():
    block = BlockPlan(degree=4, recomputed=False)
    layers = (LayerPlan(attention=block, mlp=block),) * MODEL.layers
    assert plan(micro_batch=3, layers=layers).short_form == f"4x{MODEL.layers}"


def test_without_prediction_a_plan_is_one(tmp_path):
    by_hand = dataclasses.replace(plan(), predicted=None, solver=None)
    write_plan(tmp_path / "plan.json", by_hand)
    assert read_plan(tmp_path / "plan.json") == by_hand
