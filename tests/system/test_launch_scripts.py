"""A launcher of scripts/, scaled down, from its command to a trained model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("model, knobs", [("12288x4", {}), ("8192x8", {"SCHEDULE": "vanilla", "TP": "1"})])
def test_trains_a_scaled_down_model(tmp_path, model, knobs):
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    knobs |= {"SCALE": "tiny", "ITERATIONS": "3", "PYTHON": sys.executable, "MASTER_PORT": str(_free_port())}
    report = tmp_path / "report.json"
    done = subprocess.run(
        ["bash", SCRIPTS / f"pretrain_gpt_{model}.sh", "--oases-report", report],
        env=inherited | knobs,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads(report.read_text())
    assert written["schedule"] == knobs.get("SCHEDULE", "oases")
    assert written["tensor_model_parallel_size"] == int(knobs.get("TP", 2))
    losses = [each["loss"] for each in written["iterations"]]
    assert len(losses) == 3 and losses[-1] < losses[0]
