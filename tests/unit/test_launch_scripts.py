"""The launchers' command lines, told by a stand-in for Python that prints what it is called with."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODELS = ["1024x24", "2048x24", "3072x24", "4096x16", "6144x16", "8192x8", "12288x4"]
# Asked for the number of GPUs with -c, else called to run something.
STAND_IN = '#!/bin/sh\nif [ "$1" = -c ]; then echo "${GPUS:-0}"; else echo "$@"; fi\n'


@pytest.fixture
def environment(tmp_path):
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return inherited | {"PYTHON": str(python)}


def _run(script, environment, *arguments):
    command = ["bash", SCRIPTS / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def _flags(script, environment, *arguments):
    """{flag: value} of the command that the script runs."""
    done = _run(script, environment, *arguments)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"--([\w-]+)(?: (?!--)(\S+))?", done.stdout))


@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_the_one_of_its_name(environment, model):
    flags = _flags(f"pretrain_gpt_{model}.sh", environment | {"GPUS": "4"})
    assert f"{flags['hidden-size']}x{flags['num-layers']}" == model
    assert int(flags["hidden-size"]) % int(flags["num-attention-heads"]) == 0
    assert flags["tensor-model-parallel-size"] == flags["nproc-per-node"] == "4"
    assert flags["oases-schedule"] == "oases" and flags["recompute-granularity"] == "full" and "bf16" in flags
    tiny = _flags(f"pretrain_gpt_{model}.sh", environment | {"SCALE": "tiny"})
    assert int(tiny["hidden-size"]) == int(flags["hidden-size"]) // 32
    assert int(tiny["hidden-size"]) % int(tiny["num-attention-heads"]) == 0
    assert tiny["nproc-per-node"] == "2" and "bf16" not in tiny


def test_there_is_no_other_model():
    assert {path.stem for path in SCRIPTS.glob("pretrain_gpt_*.sh")} == {f"pretrain_gpt_{model}" for model in MODELS}


def test_several_nodes(environment):
    knobs = {"NODES": "8", "NODE_RANK": "3", "DEVICES": "4", "TP": "8", "PP": "2", "MASTER_ADDR": "server0"}
    flags = _flags("pretrain_gpt_4096x16.sh", environment | knobs)
    assert (flags["nnodes"], flags["node-rank"], flags["master-addr"]) == ("8", "3", "server0")
    assert flags["global-batch-size"] == "16", "32 ranks are two replicas of TP 8 x PP 2"


def test_vanilla_data_checkpoints_and_flags_of_ones_own(environment):
    knobs = {"SCHEDULE": "vanilla", "RECOMPUTE": "none", "DATA": "my_text", "TOKENIZER": "my.model", "CHECKPOINTS": "kept"}
    flags = _flags("pretrain_gpt_1024x24.sh", environment | knobs, "--lr", "1e-5")
    assert "oases-schedule" not in flags and "recompute-granularity" not in flags and "mock-data" not in flags
    assert (flags["data-path"], flags["save"], flags["load"], flags["lr"]) == ("my_text", "kept", "kept", "1e-5")


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"DEVICES": "3", "TP": "2"}, "NODES=1 x DEVICES=3 = 3 ranks are not a multiple of TP=2 x PP=1"),
        ({"SCALE": "small"}, "SCALE=small is none of full, tiny"),
        ({"SCHEDULE": "merlin"}, "SCHEDULE=merlin is none of oases, vanilla"),
        ({"RECOMPUTE": "some"}, "RECOMPUTE=some is none of full, none"),
        ({"PRECISION": "fp8"}, "PRECISION=fp8 is none of bf16, fp16, fp32"),
        ({"DATA": "my_text"}, "needs TOKENIZER"),
        ({"COMPARE": "yes", "NODES": "2"}, "COMPARE=yes runs on one node"),
    ],
)
def test_refuses(environment, knobs, message):
    done = _run("pretrain_gpt_1024x24.sh", environment | knobs)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert not done.stdout


def test_compares_the_models_that_are_named(environment):
    done = _run("compare_gpt.sh", environment | {"NIC_GBPS": "0.5", "SCALE": "tiny"}, "4096x16", "8192x8")
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if "compare.py" in line]
    assert ["--hidden-size 128" in commands[0], "--hidden-size 256" in commands[1]] == [True, True]
    assert all("--nic-gbps 0.5" in command and "--iterations 12" in command for command in commands)
    assert _run("compare_gpt.sh", environment, "5x5").returncode == 2


def test_under_slurm_each_node_starts_torchrun(environment, tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'gpu7\\ngpu8\\n'\n")
    # Runs the task of the second of two nodes.
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nSLURM_NODEID=1 exec "$@"\n')
    for program in ("scontrol", "srun"):
        (tmp_path / program).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "123"}
    path = {"PATH": f"{tmp_path}:{environment['PATH']}"}
    flags = _flags(
        "pretrain_gpt.slurm", environment | slurm | path, SCRIPTS / "pretrain_gpt_2048x24.sh", "--train-iters", "7"
    )
    assert (flags["nnodes"], flags["node-rank"], flags["master-addr"]) == ("2", "1", "gpu7")
    assert (flags["master-port"], flags["train-iters"]) == ("20123", "7")
    assert _run("pretrain_gpt.slurm", environment | slurm | path).returncode == 2
