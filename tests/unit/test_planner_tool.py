"""tools/oases_planner.py, and its tables from a cost model."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.oases.cost.cluster_file import load_cluster
from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.roofline import RooflineCost
from megatron.oases.cost.system import System
from megatron.oases.plan import BlockPlan, LayerPlan, read_plan, write_plan
from megatron.oases.planner.problem import Choice, evaluate
from megatron.oases.planner.search import search, uniform_plans
from megatron.oases.planner.tables import legal_degrees, problem_of, segment_sizes
from tests.unit.profiles import MODEL
from tests.unit.test_plan import plan
from tests.unit.test_roofline import shape, workload
from tools import oases_planner

TOOL = Path(__file__).parents[2] / "tools" / "oases_planner.py"
TRAINING = """--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 8 --global-batch-size 8 --tensor-model-parallel-size 4 --vocab-size 1024 --bf16
    --oases-core-attention sdpa""".split()


def _tool(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *argv], capture_output=True, text=True, timeout=300)


def test_a_plan_is_printed_explained_and_written(tmp_path):
    file = tmp_path / "plan.json"
    done = _tool("--cluster", "rtx3090x4", "--explain", "--output", str(file), "--", *TRAINING)
    assert done.returncode == 0, done.stderr
    chosen = read_plan(file)
    assert chosen.short_form in done.stdout and f"{chosen.predicted.iteration_ms:.1f}" in done.stdout
    assert "Memory: " in done.stdout and "x 1.2" in done.stdout
    assert (chosen.tensor, chosen.data, len(chosen.layers)) == (4, 1, 6)


def test_what_does_not_fit_writes_no_file(tmp_path):
    file = tmp_path / "plan.json"
    done = _tool("--cluster", "rtx3090x4", "--memory-gib", "0.05", "--output", str(file), "--", *TRAINING)
    assert done.returncode == 2 and not file.exists()
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("error: no plan fits: the smallest needs 0.") and "GiB are missing" in line


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--cluster", "rtx3090x4"], "MEGATRON FLAGS are missing"),
        (["--cluster", "rtx3090x4", "--memory-gib", "-1", "--", *TRAINING], "--memory-gib -1"),
        (["--cluster", "rtx3090x4", "--output", "/no/such/p.json", "--", *TRAINING], "--output /no/such/p.json"),
        (["--cluster", "rtx3090x4", "--sub-batches", "9", "--", *TRAINING], "--sub-batches 9"),
        (["--cluster", "rtx3090x4", "--world-size", "6", "--", *TRAINING], "--world-size 6"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, argv, part):
    def stop(code):
        raise SystemExit(code)

    monkeypatch.setattr("megatron.oases.errors.os._exit", stop)
    monkeypatch.setattr(sys, "argv", ["oases_planner.py", *argv])
    with pytest.raises(SystemExit) as ended:
        oases_planner.main()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and part in line


def test_two_plans_are_told_apart(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    block = BlockPlan(degree=4, recomputed=False)
    write_plan(first, plan())
    write_plan(second, plan(layers=(LayerPlan(attention=block, mlp=block),) * MODEL.layers, predicted=None))
    done = _tool("--diff", str(first), str(second))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    assert any("degrees" in row and f"2x{MODEL.layers}" in row and f"4x{MODEL.layers}" in row for row in rows)
    assert any("predicted iteration" in row and "1.5" in row and "–" in row for row in rows)
    assert not any("sub_batches" in row or "hidden_size" in row for row in rows)


# The tables.

CLUSTER = load_cluster("rtx3090x4")


def _workload(**changes):
    return workload(**{**dict(model=shape(layers=4), tensor=4, micro_batch=8, sub_batches=2, recompute="none"), **changes})


def _problem(of, *, cluster=CLUSTER, overlaps=True, memory_bytes=None):
    return problem_of(
        RooflineCost(cluster, of),
        of,
        degrees=legal_degrees(of),
        recomputation=(False, True),
        overlaps=overlaps,
        memory_bytes=memory_bytes,
    )


def test_degrees_whose_sub_groups_divide_every_sub_batch():
    assert legal_degrees(_workload()) == (1, 2, 4)
    assert legal_degrees(_workload(sub_batches=4)) == (2, 4)
    assert legal_degrees(_workload(micro_batch=6)) == (4,)
    assert legal_degrees(_workload(tensor=1)) == (1,)


def test_segments_hold_all_layers():
    for layers in (1, 5, 12, 13, 96):
        sizes = segment_sizes(layers)
        assert sum(sizes) == layers and len(sizes) == min(layers, 8) and max(sizes) - min(sizes) <= 1


def test_degree_1_communicates_nothing_inside_and_costs_memory():
    for part in _problem(_workload()).parts[1:-1]:
        assert part[Choice(1)].forward.transfer_ms == part[Choice(1)].backward.transfer_ms == 0
        assert part[Choice(4)].forward.transfer_ms > 0
        assert part[Choice(1)].kept_bytes > part[Choice(4)].kept_bytes
        assert part[Choice(1)].once_ms > part[Choice(4)].once_ms  # gradients of its copies
        assert part[Choice(4, True)].kept_bytes < part[Choice(4)].kept_bytes
        assert part[Choice(4, True)].backward.ahead_ms > part[Choice(4)].backward.ahead_ms == 0


def test_redistribution_gathers_on_the_way_to_a_larger_degree():
    between_ms = _problem(_workload()).redistribution_ms
    forward_ms, backward_ms = between_ms[2, 4]
    assert forward_ms > 0 == backward_ms
    assert between_ms[4, 2] == (0, forward_ms)


@pytest.mark.parametrize("overlaps, system", [(True, System()), (False, System(schedule="vanilla"))])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_program_and_the_simulator_agree_on_uniform_plans(overlaps, system, recompute):
    of = _workload(recompute=recompute, sub_batches=2 if overlaps else 1)
    cost = RooflineCost(CLUSTER, of)
    problem = _problem(of, overlaps=overlaps)
    choice = Choice(4, recompute == "full")
    inside = [choice] * (len(problem.parts) - 2)
    program = evaluate(problem, [Choice(4), *inside, Choice(4)])
    simulated = Simulator(cost).predict(of, system)
    assert program.iteration_ms == pytest.approx(simulated.iteration_ms, rel=0.1)
    assert program.memory_bytes == pytest.approx(simulated.peak_bytes, rel=0.25)


def test_no_uniform_plan_is_better_and_physics_has_its_way():
    of = _workload(model=shape(layers=12))
    cost = RooflineCost(CLUSTER, of)

    def best(**changes):
        options = dict(degrees=None, sub_batches=[1, 2], recomputation=(False, True), memory_bytes=None)
        return search(cost, of, System(), **{**options, **changes})

    found = best()
    for uniform in uniform_plans(found[0], cost, System()):
        assert uniform.evaluation.iteration_ms >= found[0].evaluation.iteration_ms * (1 - 1e-3)
    needed = found[0].evaluation.memory_bytes
    short = best(memory_bytes=needed * 3 // 4)[0]
    assert short.evaluation.memory_bytes <= needed * 3 // 4
    assert short.evaluation.iteration_ms >= found[0].evaluation.iteration_ms
    nic = replace(CLUSTER.links.nic, bandwidth_gbps=CLUSTER.links.nic.bandwidth_gbps / 100)
    port = replace(CLUSTER.links.port, bandwidth_gbps=CLUSTER.links.port.bandwidth_gbps / 100)
    slow = RooflineCost(replace(CLUSTER, links=replace(CLUSTER.links, nic=nic, port=port)), of)
    slower = search(slow, of, System(), degrees=None, sub_batches=[2], recomputation=(False,), memory_bytes=None)[0]
    assert _mean_degree(slower) <= _mean_degree(found[0])


def _mean_degree(candidate) -> float:
    degrees = [degree for layer in candidate.layers for degree in layer.degrees]
    return sum(degrees) / len(degrees)
