"""scripts/quickstart.sh from corpus to resumed training, made short: no comparison, which takes minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="the script would make an environment that these tests do not run in")


def quickstart(output: Path, **environment: str) -> subprocess.CompletedProcess:
    # Variables of a launcher around the tests would reach the ranks.
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(["bash", ROOT / "scripts/quickstart.sh"], capture_output=True, text=True, timeout=500,
                          cwd="/", env=inherited | {"OUTPUT": str(output), "COMPARE": "no"} | environment)


def test_trains_on_real_text_and_resumes(tmp_path):
    result = quickstart(tmp_path, ITERATIONS="20", RESUME_ITERATIONS="3", CORPUS_MEGABYTES="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "loss 6.9" in result.stdout and "(ln 1024 = 6.931)" in result.stdout
    assert "iteration 21 follows 20" in result.stdout
    report = json.loads((tmp_path / "resume.json").read_text())
    assert [entry["iteration"] for entry in report["iterations"]] == [21, 22, 23]
    assert report["schedule"] == "oases"
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "23"


def test_failing_step_shows_its_log(tmp_path):
    result = quickstart(tmp_path, VOCABULARY="200", CORPUS_MEGABYTES="0.5")
    assert result.returncode == 2
    assert "error: failed with exit code 2: 3/7 Tokenizer" in result.stderr
    assert str(tmp_path / "tokenizer.log") in result.stderr
    assert "--vocab-size 200" in result.stderr
    assert "4/7" not in result.stdout
