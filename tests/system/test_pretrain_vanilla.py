"""Without an Oases flag it is Megatron itself that trains."""

import ast

from tests.launch import Finished, python
from tests.system.small_gpt import MOCK_DATA, SMALL

PROBE = ["tests/system/programs/vanilla_probe.py", *SMALL, *MOCK_DATA, "--train-iters", "1", "--eval-interval", "1"]


def _list_after(finished: Finished, beginning: str) -> list[str]:
    assert finished.code == 0, finished.tail
    (line,) = finished.lines(beginning)
    return ast.literal_eval(line.removeprefix(beginning))


def test_without_a_flag_nothing_of_ours_is_in_the_layers():
    finished = python(PROBE)
    assert _list_after(finished, "foreign functions: ") == []
    modules = _list_after(finished, "oases modules: ")
    assert not [name for name in modules if ".runtime" in name]


def test_with_the_schedule_it_is():
    """The probe sees what it looks for; and one tensor-parallel rank gets a line instead of silence."""
    finished = python([*PROBE, "--oases-schedule", "oases"])
    foreign = _list_after(finished, "foreign functions: ")
    assert foreign
    line = "oases: --tensor-model-parallel-size is 1: there is no tensor-parallel communication to hide"
    assert len(finished.lines(line)) == 1
