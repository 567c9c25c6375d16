"""tools/compare.py with a stand-in for pretrain_gpt.py that takes milliseconds."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.oases.report.runs import Launcher, RunFailed, parse_report, run_once
from tools import compare

STAND_IN = Path(__file__).parent / "stand_in_pretrain.py"
TOOL = Path(compare.__file__)


class StandInLauncher(Launcher):
    def command(self, script_and_flags):
        _, *flags = script_and_flags
        return [sys.executable, str(STAND_IN), *flags]


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Runs the tool's main with the stand-in; the stand-in notes the flags of each of its runs in a file."""
    log = tmp_path / "runs.jsonl"
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.setattr(compare, "Launcher", StandInLauncher)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*argv: str) -> tuple[int, list[dict]]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *argv])
        return compare.main(), [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_a_whole_comparison(stand_in, tmp_path, capsys):
    out = tmp_path / "out.json"
    code, runs = stand_in("--rounds", "2", "--iterations", "5", "--json", str(out), "--", "--seed", "7")
    assert code == 0
    assert [run["schedule"] for run in runs] == ["vanilla", "oases", "oases", "vanilla"]
    for run in runs:
        assert run["flags"][run["flags"].index("--train-iters") + 1] == "5"
        assert run["threads"] == runs[0]["threads"]
    without_report = [[flag for flag in run["flags"] if "report" not in flag] for run in runs]
    schedule = ("--oases-schedule", "oases", "vanilla")
    without_schedule = [[flag for flag in flags if flag not in schedule] for flags in without_report]
    assert all(flags == without_schedule[0] for flags in without_schedule), "systems must differ in nothing else"
    result = json.loads(out.read_text())
    assert list(result) == ["systems", "speedup", "max_loss_difference", "command", "machine"]
    assert list(result["systems"]) == ["megatron", "oases"]
    assert result["systems"]["megatron"]["iteration_ms"] == 100.0
    assert result["speedup"] == {"megatron": 1.0, "oases": 2.0}
    assert result["max_loss_difference"] == pytest.approx(1e-6)
    assert result["command"] == f"python compare.py --rounds 2 --iterations 5 --json {out} -- --seed 7"
    assert {"cores", "cpu", "torch", "megatron_core", "commit"} <= set(result["machine"])
    captured = capsys.readouterr()
    assert "oases" in captured.out and "2.000" in captured.out
    assert "run 4/4: round 2, megatron: 100.0 ms an iteration" in captured.err


def test_the_halves_run_in_the_same_alternation(stand_in, tmp_path, capsys):
    out = tmp_path / "out.json"
    code, runs = stand_in("--bound", "--rounds", "2", "--iterations", "3", "--json", str(out))
    assert code == 0
    once = [(schedule, only) for schedule in ("vanilla", "oases") for only in (None, "compute", "communication")]
    assert [(run["schedule"], run["only"]) for run in runs] == once + once[::-1]
    system = json.loads(out.read_text())["systems"]["oases"]
    assert (system["compute_only_ms"], system["communication_only_ms"], system["bound_ms"]) == (40.0, 30.0, 40.0)
    assert system["efficiency"] == pytest.approx(0.8)
    assert system["communication_hidden"] == pytest.approx(1 - 10 / 30)
    captured = capsys.readouterr()
    assert "run 12/12: round 2, megatron: 100.0 ms an iteration" in captured.err
    assert "round 1, oases, communication only: 30.0 ms an iteration" in captured.err
    assert "67%" in captured.out


def test_a_failing_run_shows_its_last_lines_and_gives_its_code(stand_in, capsys, tmp_path):
    out = tmp_path / "out.json"
    code, runs = stand_in("--rounds", "2", "--iterations", "5", "--json", str(out), "--", "--fail-with", "7")
    assert code == 7
    assert len(runs) == 1, "nothing runs after a failure"
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3:] == [
        "printed line 99",
        "(the last 40 lines of the failed run's output)",
        "error: round 1 of megatron ended with exit code 7: --flag 3 is wrong",
    ]
    assert "printed line 59" not in lines
    assert not out.exists()


def launch(**flags) -> None:
    arguments = [text for flag, value in flags.items() for text in (f"--{flag.replace('_', '-')}", value)]
    run_once(
        StandInLauncher(ranks=2, nic_gbps=None, threads_per_rank=1),
        system="oases",
        round_number=3,
        flags=["--train-iters", "4", *arguments],
        iterations=4,
        on_line=lambda line: None,
    )


def test_a_run_without_a_report_fails(monkeypatch):
    with pytest.raises(RunFailed, match="round 3 of oases gave no usable report"):
        launch(no_report="1")


def test_a_run_killed_by_a_signal_has_the_shells_code():
    with pytest.raises(RunFailed) as error:
        launch(kill_with="9")
    assert error.value.exit_code == 137


def report(**changes) -> str:
    entries = [{"iteration": i, "time_ms": 10.0 * i, "loss": 1.0 / i, "skipped": False} for i in (2, 1, 3)]
    return json.dumps({"iterations": entries, "tokens_per_iteration": 8} | changes)


def test_a_report_is_read_in_order_of_iterations():
    run = parse_report(report(), system="a", round_number=1, iterations=3)
    assert run.iterations_ms == (10.0, 20.0, 30.0)
    assert run.losses == (1.0, 1 / 2, 1 / 3)


def test_a_report_of_half_a_run_is_refused():
    with pytest.raises(ValueError, match="3 iterations instead of 4"):
        parse_report(report(), system="a", round_number=1, iterations=4)


def test_a_run_of_one_half_needs_no_loss():
    entries = [{"iteration": 1, "time_ms": 1.0, "loss": None, "skipped": False}]
    run = parse_report(report(iterations=entries), system="a", round_number=1, iterations=1, only="communication")
    assert (run.only, run.iterations_ms, run.losses) == ("communication", (1.0,), ())


def test_a_loss_that_is_not_finite_is_refused():
    broken = report(iterations=[{"iteration": 1, "time_ms": 1.0, "loss": None, "skipped": False}])
    with pytest.raises(ValueError, match="loss of iteration 1 is not finite"):
        parse_report(broken, system="a", round_number=1, iterations=1)


def test_each_rank_is_a_server_of_the_emulated_cluster():
    command = Launcher(ranks=2, nic_gbps=0.5, threads_per_rank=1).command(["pretrain_gpt.py", "--flag"])
    tool = command.index("--servers")
    assert command[tool - 1].endswith("emulate_cluster.py")
    assert command[tool : tool + 6] == ["--servers", "2", "--devices-per-server", "1", "--nic-gbps", "0.5"]
    assert command[command.index("--") :] == ["--", sys.executable, "pretrain_gpt.py", "--flag"]


def test_servers_of_several_devices():
    launcher = Launcher(
        ranks=4, nic_gbps=0.5, threads_per_rank=1, devices_per_server=2, intra_gbps=8.0, device_speed=0.4
    )
    command = launcher.command(["pretrain_gpt.py"])
    flags = command[2 : command.index("--")]
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {
        "--servers": "2", "--devices-per-server": "2", "--nic-gbps": "0.5", "--intra-gbps": "8.0", "--device-speed": "0.4"
    }  # fmt: skip


def test_without_a_nic_it_is_torchrun():
    command = Launcher(ranks=4, nic_gbps=None, threads_per_rank=1).command(["pretrain_gpt.py", "--flag"])
    assert command[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "pretrain_gpt.py", "--flag"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--systems", "megatron", "nonsense"], "nonsense"),
        (["--systems", "oases", "oases"], "twice"),
        (["--nic-gbps", "0"], "--nic-gbps 0"),
        (["--device-speed", "0.5"], "--device-speed 0.5 is of an emulated cluster: add --nic-gbps"),
        (["--nic-gbps", "1", "--devices-per-server", "0"], "--devices-per-server 0 must be above 0"),
        (["--nic-gbps", "1", "--devices-per-server", "3"], "--devices-per-server 3 does not divide 2 ranks"),
        (["--nic-gbps", "1", "--intra-gbps", "nan"], "--intra-gbps"),
        (["--rounds", "0"], "--rounds 0"),
        (["--iterations", "2"], "--iterations 2 - 2 of warm-up = 0"),
        (["--recompute", "half"], "--recompute"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json"),
        (["--", "--train-iters", "5"], "--train-iters after --"),
        (["--", "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(argv, part):
    done = subprocess.run([sys.executable, TOOL, *argv], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert part in done.stderr


def test_sigterm_ends_the_run_that_is_under_way(tmp_path):
    """The launcher gets SIGTERM and the time to clean up."""
    program = f"""
import sys
sys.argv = ["compare.py", "--iterations", "4", "--", "--wait-for-sigterm", "{tmp_path}/ended"]
sys.path.insert(0, "{TOOL.parents[1]}")
from tests.unit.test_compare import StandInLauncher
from tools import compare
compare.Launcher = StandInLauncher
sys.exit(compare.main())
"""
    tool = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=TOOL.parents[1])
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended.waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    tool.send_signal(signal.SIGTERM)
    tool.communicate(timeout=60)
    assert tool.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "ended").exists()
