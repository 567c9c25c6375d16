"""megatron/oases/environment.py: a tool in the wrong Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.oases import environment

ROOT = Path(__file__).parents[2]


def test_an_older_python_is_named(monkeypatch, capsys):
    monkeypatch.setattr(environment.sys, "version_info", (3, 11, 2))
    with pytest.raises(SystemExit) as end:
        environment.require()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: this is Python 3.11, and 3.12 or 3.13 is needed: source .venv/bin/activate\n")


def test_what_is_there_is_passed_over_and_what_is_missing_named(capsys):
    environment.require("json", "sys")
    with pytest.raises(SystemExit):
        environment.require("json", "absent_a")
    with pytest.raises(SystemExit):
        environment.require("absent_a", "absent_b")
    assert capsys.readouterr().err == (
        "error: absent_a is missing in this Python: source .venv/bin/activate\n"
        "error: absent_a, absent_b are missing in this Python: source .venv/bin/activate\n")


@pytest.mark.parametrize("tool, missing", [
    ("compare.py", "rich, torch"),
    ("preprocess_data.py", "numpy, torch, megatron.core"),
    ("train_tokenizer.py", "numpy, sentencepiece"),
])
def test_tools_say_it_in_one_line(tool, missing):
    # -S: without the installed packages, as a Python whose environment is not activated.
    result = subprocess.run([sys.executable, "-S", ROOT / "tools" / tool], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == f"error: {missing} are missing in this Python: source .venv/bin/activate\n"
