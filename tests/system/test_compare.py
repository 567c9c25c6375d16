"""tools/compare.py with the real pretrain_gpt.py, on a model that takes milliseconds."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.launch import Finished, python

# fmt: off
TINY = [
    "--num-layers", "1", "--hidden-size", "64", "--seq-length", "32", "--max-position-embeddings", "32",
    "--micro-batch-size", "2", "--global-batch-size", "2", "--num-workers", "0",
]
# fmt: on


def compare(*flags: str, overrides: list[str] = TINY) -> Finished:
    return python(["tools/compare.py", "--rounds", "1", "--iterations", "4", *flags, "--", *overrides])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="emulating a cluster needs root and iproute2",
)
def test_systems_on_an_emulated_cluster(tmp_path: Path):
    out = tmp_path / "out.json"
    finished = compare("--systems", "megatron", "oases", "--nic-gbps", "1", "--json", str(out))
    assert finished.code == 0, finished.output
    result = json.loads(out.read_text())
    systems = result["systems"]
    assert list(systems) == list(result["speedup"]) == ["megatron", "oases"]
    for system in systems.values():
        assert [len(times) for times in system["iterations_ms"]] == [4]
        assert len(set(system["losses"])) == 4, "nothing was learnt"
        assert system["tokens_per_s"] == pytest.approx(2 * 32 / system["iteration_ms"] * 1e3)
    assert result["max_loss_difference"] < 1e-4
    assert result["speedup"]["megatron"] == 1.0
    assert "speed-up" in finished.output


def test_bound_under_torchrun_without_recomputation(tmp_path: Path):
    out = tmp_path / "out.json"
    finished = compare("--systems", "oases", "--recompute", "none", "--bound", "--json", str(out))
    assert finished.code == 0, finished.output
    assert "2 ranks, torchrun on this machine, recomputation none" in finished.output
    assert "Against the bound" in finished.output
    system = json.loads(out.read_text())["systems"]["oases"]
    halves = (system["compute_only_ms"], system["communication_only_ms"])
    assert min(halves) > 0
    assert system["bound_ms"] == max(halves)
    assert system["efficiency"] == pytest.approx(system["bound_ms"] / system["iteration_ms"])
    assert 0 <= system["communication_hidden"] <= 1


def test_flags_that_the_run_refuses_are_shown():
    finished = compare("--systems", "megatron", overrides=[*TINY, "--num-attention-heads", "7"])
    assert finished.code != 0
    last = finished.output.splitlines()[-1]
    assert last.startswith("error: round 1 of megatron ended with exit code 1: ")
    assert "num-attention-heads" in last.replace("_", "-")
