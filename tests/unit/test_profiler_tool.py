"""The command line of tools/oases_profiler.py, its partial file, and its summary."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.profile import ProfileCost
from megatron.oases.cost.profile_file import ContentionCell, MemoryCell, OptimizerPoint, Overhead, VanillaCell
from megatron.oases.cost.records import to_json, write_json_object
from megatron.oases.errors import UsageError
from megatron.oases.measure.collectives import sizes_bytes
from megatron.oases.measure.partial import Partial
from megatron.oases.measure.profiler import assemble
from megatron.oases.measure.ranks import Timing
from megatron.oases.measure.session import step_times
from megatron.oases.measure.summary import collectives_table, operations_table, remarks
from megatron.oases.measure.tasks import group_shapes, is_out_of_memory
from tests.unit.profiles import profile

TOOL = Path(__file__).resolve().parents[2] / "tools" / "oases_profiler.py"
FINGERPRINT = profile().fingerprint


@pytest.fixture(scope="module")
def tool():
    specification = importlib.util.spec_from_file_location("oases_profiler", TOOL)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "--output"),
        (["--output", "x", "--repeats", "2"], "--repeats 2 must be at least 3"),
        (["--output", "."], "--output . is a folder"),
        (["--output", "x", "--fast"], "unrecognized arguments: --fast"),
        (["--output", "x", "--", "--oases-report", "y"], "--oases-report after --: a profile reports no iterations"),
        (["--output", "x", "--", "--oases-only=compute"], "--oases-only after --"),
    ],
)
def test_wrong_options_are_one_line(tool, argv, said):
    with pytest.raises(UsageError) as refused:
        tool.parse_arguments(argv)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_megatrons_flags_pass_through(tool):
    arguments, flags = tool.parse_arguments(["--output", "x.json", "--restart", "--", "--num-layers", "2"])
    assert (arguments.output, arguments.restart, arguments.repeats) == (Path("x.json"), True, 10)
    assert flags == ["--num-layers", "2"]


def test_partial_goes_on_and_begins_anew(tmp_path):
    output = tmp_path / "p.json"
    Partial(output, FINGERPRINT, restart=False).add("one", {"operations": []})
    assert Partial(output, FINGERPRINT, restart=False).finished == {"one": {"operations": []}}
    assert Partial(output, FINGERPRINT, restart=True).finished == {}
    Partial(output, FINGERPRINT, restart=False).remove()
    assert list(tmp_path.iterdir()) == []


def _changed(part: str, **changes):
    return dataclasses.replace(FINGERPRINT, **{part: dataclasses.replace(getattr(FINGERPRINT, part), **changes)})


@pytest.mark.parametrize(
    "changed, said",
    [
        (_changed("model", hidden_size=128), "its model's hidden_size is 64, here 128"),
        (_changed("software", torch="2.0"), "its software's torch is 1.0, here 2.0"),
        (_changed("device", name="another"), "its device's name is a processor, here another"),
        (_changed("layout", tensor=4), "its layout's tensor is 2, here 4"),
        (
            dataclasses.replace(FINGERPRINT, options={**FINGERPRINT.options, "optimizer": "sgd"}),
            "its options's optimizer is adam, here sgd",
        ),
    ],
)
def test_partial_of_another_run_is_refused(tmp_path, changed, said):
    output = tmp_path / "p.json"
    Partial(output, FINGERPRINT, restart=False)
    with pytest.raises(UsageError) as refused:
        Partial(output, changed, restart=False)
    assert str(refused.value) == f"{output}.partial is of another run: {said}; add --restart to begin anew"


@pytest.mark.parametrize(
    "finished, said",
    [
        ([], "finished must be an object, not []"),
        ({"one": 3}, "finished: one must be an object, not 3"),
        ({"one": {"flights": []}}, "finished: one: flights is unknown; there are operations, collectives"),
        ({"one": {"operations": 3}}, "finished: one: operations must be a list, not 3"),
        ({"one": {"overhead": [{"fixed_ms": 1}]}}, "finished: one: overhead[0]: per_micro_batch_ms is missing"),
    ],
)
def test_bug_a_partial_file_changed_by_hand_ended_in_a_traceback(tmp_path, finished, said):
    output = tmp_path / "p.json"
    partial = Partial(output, FINGERPRINT, restart=False)
    partial.path.write_text(json.dumps(json.loads(partial.path.read_text()) | {"finished": finished}))
    with pytest.raises(UsageError) as refused:
        Partial(output, FINGERPRINT, restart=False)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_bug_a_temporary_file_that_cannot_be_removed_hid_why_nothing_was_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UsageError, match="p.json cannot be written: Permission denied"):
        write_json_object(tmp_path / "p.json", {})


def test_output_that_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        Partial(tmp_path / "no" / "p.json", FINGERPRINT, restart=False)
    with pytest.raises(UsageError, match="is a folder"):
        Partial(tmp_path, FINGERPRINT, restart=False)
    with pytest.raises(UsageError, match="--output . is a folder"):
        Partial(Path("."), FINGERPRINT, restart=False)
    with pytest.raises(UsageError, match="is there, and not a file that may be replaced"):
        Partial(Path("/dev/null"), FINGERPRINT, restart=True)
    (tmp_path / "p.json").write_text("")
    with pytest.raises(UsageError, match="is there already; add --restart"):
        Partial(tmp_path / "p.json", FINGERPRINT, restart=False)


def test_groups_of_one_shape_hold_the_world():
    assert Group(2).ranks(4) == [[0, 1], [2, 3]]
    assert Group(2, 2).ranks(8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Group(2, 4).ranks(6) == [[0, 4], [1, 5]], "first and last of three pipeline stages at TP 2"
    with pytest.raises(ValueError, match="6 ranks are not groups of 4 ranks, 1 apart"):
        Group(4).ranks(6)


def test_sizes_reach_twice_the_largest_activation():
    assert sizes_bytes({10000}) == [4096, 8192, 10000, 16384]
    assert sizes_bytes({1000}) == [4096, 8192]
    assert max(sizes_bytes({2**20})) == 2**21


def test_timing_of_repeats():
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 100.0]) == Timing(median_ms=3.0, spread_ms=3.0, repeats=5)
    assert Timing.of([2.0]) == Timing(median_ms=2.0, spread_ms=0.0, repeats=1)


def test_summary_shows_what_is_there_and_what_is_missing():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(operations_table(profile()))
    console.print(collectives_table(profile()))
    text = console.export_text()
    assert "Operations on 4 samples, ms" in text
    (row,) = (line for line in text.splitlines() if "forward" in line and "recomputed" in line)
    assert "4.500 (0.100)" in row and "9.000 (0.100)" in row
    assert "all_reduce" in text and "1.000" in text
    lines = remarks(profile())
    assert "contention with 2 ranks, 1 apart: computation x 1.20, communication x 1.10" in lines
    assert "missing: 1 measurements: gloo: cannot do it" in lines
    assert any(line.startswith("operations: quartiles lie") and line.endswith("time apart") for line in lines)
    assert "two passes: 0 of 0 measurements differ by more than 10%" in lines


def _half_of_operations_apart(by: float):
    quiet = profile()
    return dataclasses.replace(
        quiet,
        operations=tuple(
            dataclasses.replace(cell, passes_apart=by if cell.degree == 2 else 0.01) for cell in quiet.operations
        ),
    )


def test_a_profile_with_a_slow_pass_is_said_to_be_so():
    apart, near = _half_of_operations_apart(by=0.36), _half_of_operations_apart(by=0.09)
    (line,) = (line for line in remarks(apart) if line.startswith("two passes"))
    assert line.startswith("two passes: 18 of 36 measurements differ by more than 10%, most of all, by 36%, forward of")
    (line,) = ProfileCost(apart, file="p.json").announcements
    # Degree 2 takes half as long as degree 1.
    assert line.startswith("p.json: two passes differ by more than 10% in 33% of the operations' time; take it again")
    assert not ProfileCost(near).announcements
    assert "two passes: 0 of 36 measurements differ by more than 10%" in remarks(near)


def _results(slower: float, missing: str | None = None) -> list[dict]:
    """A pass whose operations and collectives take `slower` times as long as in the profile made up."""
    whole = profile()
    operations = [dataclasses.replace(cell, median_ms=slower * cell.median_ms) for cell in whole.operations]
    series, unsupported = whole.collectives
    points = [dataclasses.replace(point, median_ms=slower * point.median_ms) for point in series.points]
    memory = MemoryCell(degree=2, layers=2, kept=False, samples=4, parameters_bytes=1, peak_bytes=int(9 * slower))
    sections = {
        "operations": operations if missing is None else [_missing(cell, missing) for cell in operations],
        "collectives": [dataclasses.replace(series, points=tuple(points)), unsupported],
        "contention": [ContentionCell(group_size=2, stride=1, compute=slower, communication=4 * slower)],
        "vanilla": [VanillaCell(degree=2, samples=4, kept=False, factor=slower)],
        "optimizer": [] if missing else [OptimizerPoint(parameters=10**6, median_ms=slower, spread_ms=0, repeats=5)],
        "overhead": [Overhead(fixed_ms=slower, per_micro_batch_ms=0.5)],
        "memory": [memory],
    }
    return [{name: [to_json(cell) for cell in cells]} for name, cells in sections.items()]


def _missing(cell, reason):
    return dataclasses.replace(cell, median_ms=None, spread_ms=None, missing=reason)


def _assembled(*passes: list[dict]):
    results = [result for each in passes for result in each]
    return assemble(results, fingerprint=FINGERPRINT, command="", file="p.json")


@pytest.mark.parametrize("slow_pass", [1, 2])
def test_of_two_passes_the_faster_one_counts(slow_pass):
    passes = [_results(2.25), _results(1.0)]
    merged = _assembled(*passes if slow_pass == 1 else passes[::-1])
    whole = profile()
    assert [cell.median_ms for cell in merged.operations] == [cell.median_ms for cell in whole.operations]
    assert {cell.passes_apart for cell in merged.operations} == {1.25}
    assert [point.median_ms for point in merged.collective_points] == [
        point.median_ms for point in whole.collective_points
    ]
    assert merged.collectives[0].fit.latency_ms == pytest.approx(whole.collectives[0].fit.latency_ms)
    assert merged.collectives[1] == whole.collectives[1]
    (contention,), (vanilla,), (optimizer,) = merged.contention, merged.vanilla, merged.optimizer.points
    assert (contention.compute, contention.communication, contention.passes_apart) == (1.5, 6.0, 1.25)
    assert (vanilla.factor, vanilla.passes_apart) == (1.5, 1.25)
    assert (optimizer.median_ms, optimizer.passes_apart) == (1.0, 1.25)
    assert merged.overhead.fixed_ms == 1.0 and merged.memory[0].peak_bytes == 20


def test_what_one_pass_alone_could_measure_counts():
    assert _assembled(_results(1.0), _results(1.0, missing="why")).operations == profile().operations
    assert _assembled(_results(1.0, missing="why"), _results(1.0)).operations == profile().operations


def test_bug_a_model_that_never_fits_divided_by_zero():
    merged = _assembled(_results(1.0, missing="out of memory"), _results(1.0, missing="out of memory"))
    assert merged.optimizer.missing == "out of memory"
    assert "optimizer: out of memory" in remarks(merged)


def test_out_of_memory_on_either_device():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")
    assert is_out_of_memory(full.value)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


@pytest.mark.parametrize(
    "pipeline, tied, expected",
    [(2, True, None), (3, False, None), (3, True, Group(2, stride=8)), (4, True, Group(2, stride=12))],
)
def test_bug_the_gradient_of_tied_embeddings_over_more_than_two_stages_was_not_measured(pipeline, tied, expected):
    shapes = group_shapes(tensor=2, pipeline=pipeline, data=2, degrees=[2, 1], tied_embeddings=tied)
    assert shapes[Group(pipeline, stride=4)] == (Collective.ALL_REDUCE, Collective.SEND)
    assert set(shapes) - {Group(2), Group(2, stride=2), Group(pipeline, stride=4)} == {expected} - {None}
    if expected is not None:
        assert shapes[expected] == (Collective.ALL_REDUCE,)


def test_bug_the_optimizers_time_had_the_gathering_of_parameters_in_it():
    times = step_times([("gather", 7.0), ("optimizer", 10.0), ("finalize", 1.0), ("wait", 2.0), ("step", 20.0)])
    assert (times.optimizer_ms, times.rest_ms) == (3.0, 7.0)


def test_a_profile_taken_while_something_else_ran_is_said_to_be_so():
    quiet = profile()
    noisy = dataclasses.replace(
        quiet, operations=tuple(dataclasses.replace(cell, spread_ms=cell.median_ms / 2) for cell in quiet.operations)
    )
    assert any("take the profile again" in line for line in remarks(noisy))
    assert any("the operations' times spread by 50%" in line for line in remarks(noisy))
    (line,) = ProfileCost(noisy).announcements
    assert "spread by 50%; take it again" in line
    assert not ProfileCost(quiet).announcements
