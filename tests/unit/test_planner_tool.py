"""tools/oases_planner.py, and its tables from a cost model."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.oases.cost.cluster_file import load_cluster
from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.roofline import RooflineCost
from megatron.oases.cost.system import System
from megatron.oases.errors import UsageError
from megatron.oases.plan import BlockPlan, LayerPlan, legal_degrees, read_plan, write_plan
from megatron.oases.planner import search
from megatron.oases.planner.layouts import layouts
from megatron.oases.planner.problem import Choice, evaluate
from megatron.oases.planner.search import Search, layers_of
from megatron.oases.planner.tables import problem_of, segment_sizes
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
    assert "Memory: " in done.stdout and "Binding: " in done.stdout and "Next best of the table: " in done.stdout
    assert "x 1.2" in done.stdout and "as planned" in done.stdout
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
        (["--cluster", "rtx3090x4", "--search-layout", "--", *TRAINING], "--search-layout needs --world-size"),
        (["--cluster", "rtx3090x4", "--", *TRAINING, "--oases-degrees=4x6"], "--oases-degrees: that is what is planned"),
        (["--cluster", "rtx3090x4", "--", *TRAINING, "--oases-sub-batches", "2"], "--sub-batches"),
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


def _problem(of, *, cluster=CLUSTER, system=System(), memory_bytes=None):
    return problem_of(
        RooflineCost(cluster, of),
        of,
        system,
        degrees=_legal(of),
        recomputation=(False, True),
        memory_bytes=memory_bytes,
    )


def _legal(of):
    return legal_degrees(of.tensor, micro_batch=of.micro_batch, sub_batches=of.sub_batches)


def test_degrees_whose_sub_groups_divide_every_sub_batch():
    assert _legal(_workload()) == (1, 2, 4)
    assert _legal(_workload(sub_batches=4)) == (2, 4)
    assert _legal(_workload(micro_batch=6)) == (4,)
    assert _legal(_workload(tensor=1)) == (1,)


def test_segments_hold_all_layers():
    for layers in (1, 5, 12, 13, 96):
        sizes = segment_sizes(layers)
        assert sum(sizes) == layers and len(sizes) == min(layers, 8) and max(sizes) - min(sizes) <= 1


def test_degree_1_communicates_nothing_inside_and_costs_memory():
    for part in _problem(_workload()).parts[1:-1]:
        assert part[Choice(1)].forward.transfer_ms == part[Choice(1)].backward.transfer_ms == 0
        assert part[Choice(4)].forward.transfer_ms > 0
        assert part[Choice(1)].static_bytes > part[Choice(4)].static_bytes
        assert part[Choice(1)].once_ms > part[Choice(4)].once_ms  # gradients of its copies
        assert part[Choice(4, True)].kept_bytes < part[Choice(4)].kept_bytes
        assert part[Choice(4, True)].backward.ahead_ms > part[Choice(4)].backward.ahead_ms == 0


def test_redistribution_gathers_on_the_way_to_a_larger_degree():
    between_ms = _problem(_workload()).redistribution_ms
    forward_ms, backward_ms = between_ms[2, 4]
    assert forward_ms > 0 == backward_ms
    assert between_ms[4, 2] == (0, forward_ms)


# What the formulas leave out: that a wait may be longer than the average one, and, without overlap, what Megatron
# hides.
LAYOUTS = [
    dict(tensor=4),
    dict(tensor=8),
    dict(tensor=4, micro_batches=4),
    dict(tensor=8, sequence_parallel=True),
    dict(tensor=4, pipeline=2, micro_batches=4),
    dict(tensor=4, pipeline=4, micro_batches=2),
    dict(tensor=4, data=2, distributed_optimizer=True),
]


def _agreement(changes, system):
    """(the formulas' time over the simulator's, the same of memory) of uniform and of random plans."""
    random_ = random.Random(0)
    model = shape(layers=8, element_bytes=2, stores_scores=False)
    of = _workload(**{"model": model, "micro_batch": 16, **changes})
    problem, simulator = _problem(of, system=system), Simulator(RooflineCost(CLUSTER, of))
    plans = [[choice if len(part) > 1 else next(iter(part)) for part in problem.parts] for choice in problem.parts[1]]
    plans += [[random_.choice(list(part)) for part in problem.parts] for _ in range(8)]
    for choices in plans:
        blocks = [block for layer in layers_of(problem, choices) for block in (layer.attention, layer.mlp)]
        degrees = tuple(block.degree for block in blocks)
        planned = replace(of, degrees=degrees, recomputed=tuple(block.recomputed for block in blocks))
        simulated, formulas = simulator.predict(planned, system), evaluate(problem, choices)
        yield formulas.iteration_ms / simulated.iteration_ms, formulas.memory_bytes / simulated.peak_bytes


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_the_program_and_the_simulator_agree(changes):
    for time, memory in _agreement(changes, System(host_sees_completion=False)):
        assert time == pytest.approx(1, abs=0.1)
        assert memory == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_without_overlap_the_program_counts_what_megatron_hides(changes):
    for time, memory in _agreement(changes, System(schedule="vanilla")):
        assert 0.95 < time < 1.2
        assert memory == pytest.approx(1, abs=0.1)


def _search(of, *, cluster=CLUSTER, sub_batches=(1, 2), recomputation=(False, True), memory_bytes=None):
    options = dict(degrees=None, recomputation=recomputation, memory_bytes=memory_bytes)
    return Search(RooflineCost(cluster, of), of, System(), **options).run(sub_batches)


def _slower_links(factor: float):
    links = CLUSTER.links
    slower = {
        name: replace(link, bandwidth_gbps=link.bandwidth_gbps / factor, latency_us=link.latency_us * factor)
        for name in ("port", "host", "nic")
        if (link := getattr(links, name)) is not None
    }
    return replace(CLUSTER, links=replace(links, **slower))


def test_the_simulator_decides_and_no_uniform_plan_is_better():
    found = _search(_workload(model=shape(layers=6), tensor=8))
    times_ms = [each.simulated.iteration_ms for each in found]
    assert times_ms == sorted(times_ms)
    uniform = [each for each in found if each.name.startswith("all ")]
    planned = [each for each in found if each.name.startswith("plan")]
    assert len(uniform) >= 2 and len(planned) >= 2
    assert len({(each.layers, each.workload.sub_batches) for each in found}) == len(found)


def test_communication_a_hundred_times_slower_lowers_degrees():
    # With few micro-batches the copies' gradients, sent once an iteration, would outweigh activations.
    of = _workload(model=shape(layers=12, element_bytes=2, stores_scores=False), tensor=8, micro_batches=8)
    now, slower = (_search(of, cluster=_slower_links(factor), recomputation=(False,))[0] for factor in (1, 100))
    assert _mean_degree(slower) < _mean_degree(now)


def test_half_the_memory_raises_degrees_or_recomputes_more():
    of = _workload(model=shape(layers=12), tensor=8)
    now = _search(of)[0]
    half = now.simulated.peak_bytes // 2
    less = _search(of, memory_bytes=half)[0]
    assert less.simulated.peak_bytes <= half
    assert less.simulated.iteration_ms > now.simulated.iteration_ms
    assert _mean_degree(less) > _mean_degree(now) or _recomputed(less) > _recomputed(now)


def test_a_stage_with_more_micro_batches_in_flight_recomputes_more():
    of = _workload(model=shape(layers=8, padded_vocabulary=1024), pipeline=4, micro_batches=8)
    free = _search(of, sub_batches=(2,))[0]
    for percent in (95, 90, 85, 80, 75, 70):
        limit = free.simulated.peak_bytes * percent // 100
        tight = _search(of, sub_batches=(2,), memory_bytes=limit)[0]
        assert tight.simulated.peak_bytes <= limit
        recomputed = [sum(tight.workload.recomputed[4 * stage : 4 * stage + 4]) for stage in range(4)]
        assert recomputed[0] > recomputed[3]


def test_less_memory_is_never_faster():
    of = _workload(model=shape(layers=8, padded_vocabulary=1024), pipeline=4, micro_batches=8)
    peak_bytes = _search(of, sub_batches=(2,))[0].simulated.peak_bytes
    limits = [peak_bytes * percent // 100 for percent in (100, 90, 80, 70, 60)]
    times_ms = [_search(of, sub_batches=(2,), memory_bytes=limit)[0].simulated.iteration_ms for limit in limits]
    assert times_ms == sorted(times_ms)


def test_formulas_that_take_too_little_memory_are_corrected(monkeypatch):
    """The program gets less until what it finds fits when it is simulated."""
    of = _workload(model=shape(layers=4))
    real = search.problem_of

    def optimistic(*args, **options):
        problem = real(*args, **options)
        segments = tuple(
            replace(segment, parts=tuple({c: replace(k, kept_bytes=k.kept_bytes // 2) for c, k in part.items()} for part in segment.parts))
            for segment in problem.segments
        )  # fmt: skip
        return replace(problem, segments=segments)

    limit = _search(of, sub_batches=(2,))[0].simulated.peak_bytes * 3 // 4
    monkeypatch.setattr(search, "problem_of", optimistic)
    best = next(each for each in _search(of, sub_batches=(2,), memory_bytes=limit) if each.name.startswith("plan"))
    assert best.evaluation.memory_bytes < best.simulated.peak_bytes <= limit


def _mean_degree(candidate) -> float:
    degrees = [degree for layer in candidate.layers for degree in layer.degrees]
    return sum(degrees) / len(degrees)


def _recomputed(candidate) -> int:
    return sum(candidate.workload.recomputed)


def test_every_layout_once():
    flags = ["--global-batch-size", "8"]
    every = list(layouts(flags, world_size=4))
    assert len(every) == len(set(every))
    for layout in every:
        assert layout.tensor * layout.pipeline * layout.data == 4
        assert 8 % (layout.micro_batch * layout.data) == 0
    shapes = {(layout.tensor, layout.pipeline, layout.data) for layout in every}
    assert shapes == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    fixed = list(layouts([*flags, "--tensor-model-parallel-size=2", "--micro-batch-size", "2"], world_size=4))
    assert {(layout.tensor, layout.micro_batch) for layout in fixed} == {(2, 2)} and len(fixed) == 2
    for wrong, said in (([], "--global-batch-size"), ([*flags, "--micro-batch-size", "3"], "--micro-batch-size 3")):
        with pytest.raises(UsageError, match=said):
            list(layouts(wrong, world_size=4))


def test_the_best_layout_is_written(tmp_path):
    file = tmp_path / "plan.json"
    fixed = TRAINING.index("--tensor-model-parallel-size")
    flags = [*TRAINING[:fixed], *TRAINING[fixed + 2 :]]
    tool = ("--cluster", "rtx3090x4", "--search-layout", "--world-size", "4", "--output", str(file))
    done = _tool(*tool, "--", *flags)
    assert done.returncode == 0, done.stderr
    best = read_plan(file)
    table = done.stdout.split("Plans for")[0]
    rows = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
    sizes = {tuple(map(int, row[:4])) for row in rows if row[0].strip()}
    # --micro-batch-size 8 of 8 samples leaves no data parallelism.
    assert sizes == {(4, 1, 1, 8), (2, 2, 1, 8), (1, 4, 1, 8)}
    times_ms = {tuple(map(int, row[:3])): float(row[5]) for row in rows if row[5].strip()}
    assert min(times_ms, key=times_ms.get) == (best.tensor, best.pipeline, best.data)
    assert best.predicted.iteration_ms == pytest.approx(min(times_ms.values()), abs=0.06)
    (refused,) = [row for row in rows if row[0].strip() == "1"]  # 6 layers are not 4 stages
    assert not refused[5].strip() and refused[7].strip()


def test_without_overlap_the_plan_is_for_megatrons_order(tmp_path):
    file = tmp_path / "plan.json"
    done = _tool("--cluster", "rtx3090x4", "--system", "alpa", "--output", str(file), "--", *TRAINING)
    assert done.returncode == 0, done.stderr
    plan = read_plan(file)
    assert (plan.schedule, plan.sub_batches, plan.predicted.by) == ("vanilla", 1, "simulator")
    assert plan.devices.name == "NVIDIA GeForce RTX 3090"
