"""Whole trainings with a degree for each block: losses equal vanilla Megatron's over several optimizer steps."""

import json

import pytest

from megatron.oases.plan import BlockPlan, LayerPlan, Plan, write_plan
from tests.launch import torchrun
from tests.system.small_gpt import MOCK_DATA, SMALL, losses
from tests.unit.profiles import MODEL

# Two pipeline stages of two tensor-parallel ranks; the first one ends with sub-groups, the second one begins with them.
_FLAGS = [
    "pretrain_gpt.py", *SMALL, *MOCK_DATA, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2",
    "--num-layers", "4", "--micro-batch-size", "4", "--global-batch-size", "8", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--train-iters", "8", "--eval-interval", "4",
]  # fmt: skip
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_DEGREES = "--oases-degrees 2/1,2/1,1/2,1"


def _plan(path) -> None:
    layers = tuple(
        LayerPlan(attention=BlockPlan(degree=a, recomputed=True), mlp=BlockPlan(degree=b, recomputed=a == b))
        for a, b in ((2, 1), (1, 1), (1, 2), (2, 1))
    )
    plan = Plan(
        version=1, model=MODEL, costs="by hand", tensor=2, data=1, pipeline=2, micro_batch=4, micro_batches=2,
        schedule="oases", sub_batches=2, layers=layers, predicted=None, solver=None,
    )  # fmt: skip
    write_plan(path, plan)


def _train(flags: list[str], report) -> dict[int, float]:
    finished = torchrun([*_FLAGS, *flags, "--oases-report", str(report)], ranks=4)
    assert finished.code == 0, finished.tail
    said = finished.lines("oases: iterations")
    assert [line.partition(",")[0] for line in said] == _said(flags), said
    assert all("communication in flight" in line and "hidden" in line for line in said)
    return losses(report)


def _said(flags: list[str]) -> list[str]:
    """Of which iterations one rank says how much communication was hidden."""
    if not flags:
        return []
    between = ["oases: iterations 1 to 5"] if "--oases-report-interval" in flags else []
    return [*between, "oases: iterations 2 to 8"]


def test_equals_vanilla(tmp_path):
    expected = _train([], tmp_path / "vanilla.json")
    reached = list(expected.values())
    assert reached[0] - reached[-1] > 1e-3, f"nothing was learnt, the comparison would prove nothing: {reached}"
    _plan(tmp_path / "plan.json")
    for name, flags in (
        ("oases", f"--oases-schedule oases {_DEGREES} {_FULL} --oases-report-interval 5"),
        ("megatron", f"--oases-schedule vanilla {_DEGREES} {_FULL}"),
        ("plan", f"--oases-plan {tmp_path / 'plan.json'} --sequence-parallel"),
    ):
        found = _train(flags.split(), tmp_path / f"{name}.json")
        assert found == pytest.approx(expected, rel=2e-6), name
    degrees = [json.loads((tmp_path / f"{name}.json").read_text())["degrees"] for name in ("vanilla", "oases", "plan")]
    assert degrees == [None, "2/1x2,1/2,1", "2/1,1,1/2,2/1"]
