"""The command line of tools/oases_profiler.py, its partial file, and its summary."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from rich.console import Console

from megatron.oases.cost.model import Group
from megatron.oases.cost.profile import ProfileCost
from megatron.oases.errors import UsageError
from megatron.oases.measure.collectives import sizes_bytes
from megatron.oases.measure.partial import Partial
from megatron.oases.measure.ranks import Timing
from megatron.oases.measure.summary import collectives_table, operations_table, remarks
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
    ],
)
def test_partial_of_another_run_is_refused(tmp_path, changed, said):
    output = tmp_path / "p.json"
    Partial(output, FINGERPRINT, restart=False)
    with pytest.raises(UsageError) as refused:
        Partial(output, changed, restart=False)
    assert str(refused.value) == f"{output}.partial is of another run: {said}; add --restart to begin anew"


def test_output_that_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        Partial(tmp_path / "no" / "p.json", FINGERPRINT, restart=False)
    with pytest.raises(UsageError, match="is a folder"):
        Partial(tmp_path, FINGERPRINT, restart=False)
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


def test_a_profile_taken_while_something_else_ran_is_said_to_be_so():
    quiet = profile()
    noisy = dataclasses.replace(
        quiet, operations=tuple(dataclasses.replace(cell, spread_ms=cell.median_ms / 2) for cell in quiet.operations)
    )
    assert any("take the profile again" in line for line in remarks(noisy))
    (line,) = ProfileCost(noisy).announcements
    assert "spread by 50%; take it again" in line
    assert not ProfileCost(quiet).announcements
