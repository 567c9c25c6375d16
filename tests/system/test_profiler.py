"""tools/oases_profiler.py on two ranks, with a model that takes milliseconds."""

import json
import math
import time
from pathlib import Path

from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.profile import ProfileCost
from megatron.oases.cost.profile_file import Profile, read_profile
from megatron.oases.schedule import Kind, Layout, Part, Role, build_chain
from tests.launch import running, torchrun, torchrun_command
from tests.system.small_gpt import MOCK_DATA, SMALL

# fmt: off
FLAGS = [
    *SMALL, *MOCK_DATA, "--num-layers", "1", "--tensor-model-parallel-size", "2", "--sequence-parallel",
    "--train-iters", "5", "--eval-interval", "1000",
]
# fmt: on
MICRO_BATCH = 2


def _profiler(output: Path, *own: str, flags: list[str] = FLAGS) -> list[str]:
    return ["tools/oases_profiler.py", "--output", str(output), "--repeats", "3", *own, "--", *flags]


def _kill_after(output: Path, measurements: int) -> dict:
    """Starts a run, kills it once so many measurements are finished, and returns those."""
    partial = output.with_name(f"{output.name}.partial")
    with running(torchrun_command(_profiler(output), 2)) as program:
        deadline_s = time.monotonic() + 120
        while True:
            finished = json.loads(partial.read_text())["finished"] if partial.exists() else {}
            if len(finished) >= measurements:
                program.kill()
                return json.loads(partial.read_text())["finished"]
            assert program.process.poll() is None and time.monotonic() < deadline_s, program.output
            time.sleep(0.1)


def test_killed_resumed_and_complete(tmp_path: Path):
    output = tmp_path / "profile.json"
    finished = _kill_after(output, measurements=2)
    assert not output.exists()

    other = torchrun(_profiler(output, flags=[*FLAGS, "--hidden-size", "128"]))
    assert other.code != 0
    (line,) = other.lines("error: ")
    assert "is of another run: its model's hidden_size is 64, here 128; add --restart" in line
    assert "take_profile" not in other.output, "a traceback"

    resumed = torchrun(_profiler(output))
    assert resumed.code == 0, resumed.tail
    for name in finished:
        assert name.startswith("pass 1: ") and f"{name} ..." not in resumed.output, "was measured again"
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert "Operations on 2 samples, ms" in resumed.output
    profile = read_profile(output)
    first_pass = [entry for result in finished.values() for entry in result.get("collectives", [])]
    assert len(first_pass) >= 2
    for before, merged in zip(first_pass, json.loads(output.read_text())["collectives"], strict=False):
        for ours, point in zip(before["points"], merged["points"], strict=True):
            apart = ours["median_ms"] / point["median_ms"] - 1
            assert apart == 0 or math.isclose(apart, point["passes_apart"]), "is of neither pass"
    _check_complete(profile)

    again = torchrun(_profiler(output))
    assert again.code != 0
    (line,) = again.lines("error: ")
    assert "profile.json is there already; add --restart to replace it" in line


def _check_complete(profile: Profile) -> None:
    """Everything that a simulation may ask for is there, and positive."""
    cells = {(cell.kind, cell.role, cell.degree, cell.samples, cell.kept): cell for cell in profile.operations}
    assert len(cells) == len(profile.operations), "a cell is there twice"
    assert all(cell.passes_apart is not None for cell in profile.operations), "one pass alone has measured it"
    assert len(profile.in_passes) > len(profile.operations)
    cost = ProfileCost(profile)
    for degree in (1, 2):
        for kept in (False, True):
            for kind, role, is_kept in _needed(degree, kept):
                part = Part(role, recomputed=not is_kept and role in (Role.ATTENTION, Role.MLP))
                for samples in (1, 2):
                    cell = cells.pop((kind, role, degree, samples, is_kept), None)
                    assert cell is None or (cell.missing is None and cell.median_ms > 0), cell
                    assert cost.compute_ms(kind, part, degree=degree, samples=samples) > 0
    assert not cells, "cells that nobody asks for"
    for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        assert cost.collective_ms(collective, Group(2), MICRO_BATCH * 32 * 64 * 4) > 0
    contention = cost.contention(Group(2))
    assert 1 <= min(contention.compute, contention.communication) < math.inf
    assert cost.optimizer_ms(10**6) > 0
    assert cost.iteration_overhead_ms(1) >= 0
    assert {cell.kept for cell in profile.vanilla} == {False, True}
    assert all(cell.factor > 0 for cell in profile.vanilla)
    assert {(cell.degree, cell.kept) for cell in profile.memory} == {(1, False), (1, True), (2, False), (2, True)}
    shape = profile.fingerprint.model
    for cell in profile.memory:
        expected = 4 * sum(
            shape.parameters(role, degree=cell.degree) * (cell.layers if role in (Role.ATTENTION, Role.MLP) else 1)
            for role in Role
        )
        assert cell.parameters_bytes == expected
        assert cell.peak_bytes > expected


def _needed(degree: int, kept: bool) -> set[tuple[Kind, Role, bool]]:
    chain = build_chain(
        layers=1, recomputed_layers=0 if kept else 1, embedding=True, head=True, keeps_last_layer=False
    )
    layout = Layout(chain=chain, sub_batches=1, sequence_parallel=degree > 1)
    return {
        (operation.kind, part.role, not part.recomputed)
        for operation in layout.forward_operations() | layout.backward_operations()
        if not operation.kind.is_communication
        for part in [chain[operation.place]]
    }
