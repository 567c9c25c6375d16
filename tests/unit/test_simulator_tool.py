"""tools/oases_simulator.py: its command line, and predictions for Megatron's flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.oases.cost.prediction import FlagParser, predict
from megatron.oases.cost.sources import cluster_source
from megatron.oases.errors import UsageError
from megatron.oases.plan import read_plan
from megatron.oases.report.systems import RECOMPUTE, planned_flags
from megatron.oases.report.validation import WORKLOADS, Case, Compared, Validation, cases
from tools import oases_simulator

TOOL = Path(oases_simulator.__file__)


@pytest.mark.parametrize(
    "argv, part",
    [
        ([], "one of the arguments --cluster --profile --validate is required"),
        (["--cluster", "emulated", "--profile", "a.json"], "not allowed with argument"),
        (["--cluster", "no-such-cluster"], "no-such-cluster"),
        (["--profile", "/no/such/profile.json"], "/no/such/profile.json"),
        (["--cluster", "emulated", "--systems", "nonsense"], "nonsense"),
        (["--cluster", "emulated", "--systems", "oases", "oases"], "twice"),
        (["--cluster", "emulated", "--trace", "/no/such/x.json"], "--trace /no/such/x.json: there is no folder"),
        (["--cluster", "emulated", "--png", "x.txt"], "--png x.txt"),
        (["--validate", "--json", "/proc/x.json"], "--json /proc/x.json cannot be written"),
        (["--cluster", "emulated", "--json", "/tmp"], "--json /tmp is a folder"),
        (["--cluster", "emulated", "--rounds", "3"], "--rounds has no meaning without --validate"),
        (["--cluster", "emulated", "--world-size", "3"], "--world-size 3 is not a multiple of TP x PP = 2"),
        (["--cluster", "emulated", "--recompute", "none", "--", "--num-layers", "2"], "--recompute none"),
        (["--cluster", "emulated", "--", "--num-layers", "2"], "vocab-size"),
        (["--validate", "--world-size", "2"], "--world-size has no meaning with --validate"),
        (["--validate", "--workloads", "9"], "--workloads 9: there are 1 to 6"),
        (["--validate", "--nic-gbps", "0"], "--nic-gbps 0"),
        (["--validate", "--iterations", "2"], "--iterations 2"),
        (["--validate", "--", "--num-layers", "2"], "has its own workloads"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, argv, part):
    def stop(code):
        raise SystemExit(code)

    monkeypatch.setattr("megatron.oases.errors.os._exit", stop)
    monkeypatch.setattr(sys, "argv", ["oases_simulator.py", *argv])
    monkeypatch.setattr(oases_simulator.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        oases_simulator.main()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ")
    assert part in captured.err


def _tool(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *argv], capture_output=True, text=True, timeout=300)


TRAINING = """--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 4 --global-batch-size 4 --tensor-model-parallel-size 2 --vocab-size 512""".split()


def test_a_training_command_is_taken_as_it_is(tmp_path):
    file = tmp_path / "o.json"
    elsewhere = """--train-samples 400 --data-path 0.5 /no/such/a 0.5 /no/such/b --split 98,2,0 --lr 3e-4 --lr-warmup-samples 100
        --tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model --save /no/such/folder --save-interval 5
        --load /no/such/folder --tensorboard-dir /no/such/logs --log-throughput""".split()
    done = _tool("--cluster", "emulated", "--json", str(file), "--", *TRAINING, *elsewhere)
    assert done.returncode == 0, done.stderr
    oases = json.loads(file.read_text())["systems"]["oases"]
    assert oases["tokens_per_s"] == pytest.approx(4 * 64 / oases["iteration_ms"] * 1e3)


def test_a_prediction_with_every_output(tmp_path):
    files = {flag: tmp_path / name for flag, name in (("--trace", "t.json"), ("--png", "t.png"), ("--json", "o.json"))}
    outputs = [text for flag, path in files.items() for text in (flag, str(path))]
    done = _tool("--cluster", "emulated", *outputs)
    assert done.returncode == 0, done.stderr
    systems = json.loads(files["--json"].read_text())["systems"]
    assert list(systems) == ["megatron", "oases"]
    assert 0 < systems["oases"]["iteration_ms"] < systems["megatron"]["iteration_ms"]
    for name, system in systems.items():
        (stage,) = system["stages"]
        parts = ("compute", "exposed", "pipeline", "data_parallel", "optimizer", "overhead")
        assert sum(stage[f"{part}_ms"] for part in parts) == pytest.approx(system["iteration_ms"])
        assert f"{system['iteration_ms']:.1f}" in done.stdout and name in done.stdout
    assert json.loads(files["--trace"].read_text())["traceEvents"]
    assert files["--png"].read_bytes().startswith(b"\x89PNG")


def test_degrees_and_plans_of_a_training_command(tmp_path, monkeypatch, capsys):
    file, written = tmp_path / "o.json", tmp_path / "plan.json"
    planner = TOOL.with_name("oases_planner.py")
    argv = [sys.executable, planner, "--cluster", "emulated", "--output", written, "--", *TRAINING]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    plan = read_plan(written)
    degrees = ["oases --oases-degrees 2/1,1/2", "oases --oases-degrees 1x2"]
    systems = ["--systems", "megatron", f"oases --oases-plan {written}", *degrees]
    done = _tool("--cluster", "emulated", "--json", str(file), *systems, "--", *TRAINING)
    assert done.returncode == 0, done.stderr
    _, planned, mixed, uniform = json.loads(file.read_text())["systems"].values()
    assert planned["iteration_ms"] == pytest.approx(plan.predicted.iteration_ms)
    assert planned["peak_bytes"] == plan.predicted.memory_bytes
    assert planned["iteration_ms"] <= min(mixed["iteration_ms"], uniform["iteration_ms"])
    assert uniform["stages"][0]["parameters_bytes"] > mixed["stages"][0]["parameters_bytes"]
    # After the double dash for all systems, and vanilla Megatron is none that the plan was made for.
    refused = f"--oases-schedule vanilla: --oases-plan {written} has schedule oases"
    argv = ["--cluster", "emulated", "--", *TRAINING, "--oases-plan", str(written)]
    test_a_mistake_is_one_line(monkeypatch, capsys, argv, refused)
    assert not plan.layers[-1].mlp.recomputed
    argv = ["--cluster", "emulated", *systems[:1], systems[2], "--", *TRAINING, *RECOMPUTE["full"]]
    test_a_mistake_is_one_line(monkeypatch, capsys, argv, "--recompute-granularity full: ")


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--oases-degrees", "2"), "--oases-degrees 2 names 1 layers, --num-layers is 2"),
        (("--oases-degrees", "3,2"), "--oases-degrees 3,2: layer 1 of 2, attention: degree 3 does not divide --tensor-model-parallel-size 2; legal here: 1, 2"),
        (("--oases-degrees=1x2", "--micro-batch-size", "3", "--global-batch-size", "3"), "sub-groups, among which"),
        (("--oases-degrees", "2x2", "--oases-plan", "p.json"), "p.json cannot be read"),
        (("--oases-plan", "/no/such/p.json"), "/no/such/p.json cannot be read"),
    ],
)
def test_degrees_that_cannot_be_are_one_line(monkeypatch, capsys, flags, said):
    test_a_mistake_is_one_line(monkeypatch, capsys, ["--cluster", "emulated", "--", *TRAINING, *flags], said)


def test_what_is_not_simulated_is_refused():
    done = _tool("--cluster", "emulated", "--systems", "oases", "--", *TRAINING, "--oases-split", "sequence")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: --oases-split sequence is not simulated: costs are of whole samples"


@pytest.mark.parametrize(
    "cluster, more, said",
    [
        (
            "rtx3090x4",
            "--num-attention-heads 5 --hidden-size 160",
            "--num-attention-heads 5 is not divisible by --tensor-model-parallel-size 2: 5 = 2 x 2 + 1",
        ),
        ("rtx3090x4", "--ffn-hidden-size 333", "--ffn-hidden-size 333 is not divisible by --tensor-model-parallel"),
        ("rtx3090x4", "--qk-layernorm", "--qk-layernorm: normalization of queries and keys is not simulated"),
        ("rtx3090x4", "--window-size 8,0", "--window-size: attention to a window is not simulated"),
        ("rtx3090x4", "--fp32-residual-connection --bf16", "--fp32-residual-connection: a residual in fp32 is not"),
        (
            "rtx3090x4",
            "--use-precision-aware-optimizer --use-distributed-optimizer --bf16",
            "--use-precision-aware-optimizer: an optimizer with",
        ),
        ("rtx3090x4", "--oases-device cpu", "--oases-device cpu, but the costs are of devices of the kind cuda"),
        ("emulated", "--attention-backend flash", "--attention-backend flash needs Transformer Engine and a GPU"),
        ("emulated", "--oases-device cuda", "--oases-device cuda, but the costs are of devices of the kind cpu"),
    ],
)
def test_flags_that_are_not_honoured_are_named(parser, cluster, more, said):
    with pytest.raises(UsageError) as refused:
        _predicted(parser, cluster, more)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        "--transformer-impl transformer_engine",
        "--attention-backend flash",
        "--oases-device cuda --distributed-backend nccl",
        "--use-flash-attn",
    ],
)
def test_bug_this_machine_decided_what_a_cluster_of_gpus_can_do(parser, more):
    assert _predicted(parser, "rtx3090x4", more) > 0


def test_gradients_that_are_not_clipped_take_less_time(parser):
    clipped, not_clipped = (_predicted(parser, "rtx3090x4", more) for more in ("", "--clip-grad 0"))
    assert not_clipped < clipped


@pytest.fixture(scope="module")
def parser():
    return FlagParser()


def _predicted(parser, cluster: str, more: str) -> float:
    source, flags = cluster_source(cluster), planned_flags([*TRAINING, *more.split()])
    options = dict(parser=parser, world_size=2, record=False, announce=lambda line: None)
    return predict(flags, ["megatron"], source, **options)["megatron"].iteration_ms


def _compared(case: Case, system: str, predicted_ms: float, measured_ms: float) -> Compared:
    return Compared(case=case, system=system, predicted_ms=predicted_ms, measured_ms=measured_ms)


def test_validation_counts_errors_and_orders():
    first, second = cases([1, 2], [0.5])
    validation = Validation(
        compared=(
            _compared(first, "megatron", 110.0, 100.0),
            _compared(first, "oases", 72.0, 80.0),
            _compared(second, "megatron", 90.0, 100.0),
            _compared(second, "oases", 95.0, 95.0),
        )
    )
    assert validation.median_error == pytest.approx(0.1)
    assert validation.worst_error == pytest.approx(0.1)
    assert validation.ranking_is_right(first) and not validation.ranking_is_right(second)
    assert validation.right_rankings == (1, 2)


def test_six_workloads_of_different_shape():
    assert len(WORKLOADS) == 6 == len({workload.name for workload in WORKLOADS})
    assert {workload.recompute for workload in WORKLOADS} == {"full", "none"}
    paths = {case.profile_path(Path("x")) for case in cases(range(1, 7), (1.0, 0.5, 0.25))}
    assert len(paths) == 18
