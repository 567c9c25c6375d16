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
    Run,
    Solver,
    check_plan,
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
        predicted=Predicted(by="simulator", iteration_ms=1.5, exposed_ms=0.5, in_flight_ms=0.75, waited_ms=0.25, memory_bytes=10**9),
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
        (lambda d: d["layers"][0]["mlp"].update(degree=3), "layers[0]: mlp: degree 3 does not divide --tensor-model-parallel-size 4; legal here: 2, 4"),
        (lambda d: d["layers"][1]["attention"].update(degree=8), "layers[1]: attention: degree 8 does not divide"),
        (lambda d: d["layers"][0]["mlp"].update(degree=1), "4 sub-groups, among which --micro-batch-size 4 in sub-batches of 2 + 2 samples"),
        (lambda d: d["layers"].pop(), "layers are"),
        (lambda d: d.update(pipeline=3), "layers are 4, which pipeline 3 does not divide"),
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


RUN = Run(model=MODEL, world_size=4, tensor=4, pipeline=1, micro_batch=4, global_batch=4, sub_batches=2, memory_bytes=10**9)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(model=dataclasses.replace(MODEL, hidden_size=128)), "another model: hidden_size is 64, here 128"),
        (dict(tensor=2), "--tensor-model-parallel-size 2: p.json is a plan for 4"),
        (dict(pipeline=2), "--pipeline-model-parallel-size 2: p.json is a plan for 1"),
        (dict(world_size=8), "8 ranks: p.json is a plan for TP 4 x PP 1 x DP 1 = 4"),
        (dict(micro_batch=8), "--micro-batch-size 8: p.json is a plan for 4"),
        (dict(global_batch=8), "1 micro-batches of 4 samples on each of 1 data-parallel replicas = 4"),
        (dict(memory_bytes=2**29), "p.json needs 0.93 GiB on a device, which has 0.50: 0.43 GiB are missing"),
    ],
)
def test_a_run_that_is_not_the_plans_is_refused(changes, said):
    check_plan(plan(), RUN, where="p.json")
    check_plan(plan(), dataclasses.replace(RUN, memory_bytes=None), where="p.json")
    with pytest.raises(UsageError) as refused:
        check_plan(plan(), dataclasses.replace(RUN, **changes), where="p.json")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(heads=6), "layer 2 of 4, attention: degree 4 does not divide --num-attention-heads 6: 6 = 1 x 4 + 2; legal here: 2"),
        (dict(query_groups=3), "degree 4 and --num-query-groups 3: neither divides the other; legal here: none"),
        (dict(ffn_hidden_size=258), "layer 2 of 4, mlp: degree 4 does not divide --ffn-hidden-size 258: 258 = 64 x 4 + 2; legal here: 2"),
    ],
)  # fmt: skip
def test_a_block_that_cannot_be_sharded_is_refused(changes, said):
    model = dataclasses.replace(MODEL, **changes)
    layers = list(plan().layers)
    if "query_groups" in changes:
        layers[0] = LayerPlan(attention=BlockPlan(degree=4, recomputed=True), mlp=layers[0].mlp)
    block = BlockPlan(degree=4, recomputed=True)
    layers[1] = LayerPlan(attention=block, mlp=block)
    with pytest.raises(UsageError) as refused:
        check_plan(plan(model=model, layers=tuple(layers)), dataclasses.replace(RUN, model=model), where="p.json")
    assert said in str(refused.value)
    shared = dataclasses.replace(MODEL, query_groups=2)  # two ranks have one group
    check_plan(plan(model=shared, layers=tuple(layers)), dataclasses.replace(RUN, model=shared), where="p.json")


def test_uneven_sub_batches_take_the_largest_degree():
    block = BlockPlan(degree=4, recomputed=False)
    layers = (LayerPlan(attention=block, mlp=block),) * MODEL.layers
    assert plan(micro_batch=3, layers=layers).short_form == f"4x{MODEL.layers}"


def test_without_prediction_a_plan_is_one(tmp_path):
    by_hand = dataclasses.replace(plan(), predicted=None, solver=None)
    write_plan(tmp_path / "plan.json", by_hand)
    assert read_plan(tmp_path / "plan.json") == by_hand
