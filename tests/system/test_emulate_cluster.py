"""Runs tools/emulate_cluster.py for real: links, exit codes, and that nothing is left however a run ends."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = REPOSITORY / "tools" / "emulate_cluster.py"
PROGRAMS = Path(__file__).parent / "emulated_programs"
DEADLINE_S = 60

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="emulating a cluster needs root and iproute2",
)


def start(command: list[str], *flags: str, servers: int = 2, gbps: float = 0.5, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, TOOL, "--servers", str(servers), "--nic-gbps", str(gbps), *flags, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(tool: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = tool.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        tool.kill()
        raise
    return tool.returncode, out, err


def run(command: list[str], *flags: str, **options) -> tuple[int, str, str]:
    return finish(start(command, *flags, **options))


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def holders_of(namespaces: set[str]) -> list[str]:
    """Everything in /proc that keeps one of these namespaces alive."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link) in namespaces:
                    found.append(str(link))
            except OSError:
                continue
    return found


def cgroups_of(tool: subprocess.Popen) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/oases-emulation-{tool.pid}-*"))


def watchdog_of(tool: subprocess.Popen) -> int:
    children = Path(f"/proc/{tool.pid}/task/{tool.pid}/children").read_text().split()
    (watchdog,) = [pid for pid in children if b"cleanup.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(watchdog)


def eventually(condition) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_each_rank_has_a_namespace_an_address_and_torchruns_variables():
    host = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    script = 'echo "$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"'
    script += " $(readlink /proc/self/ns/net) $(ip -4 -o addr show dev $GLOO_SOCKET_IFNAME | awk '{print $4}')"
    code, out, _ = run(shell(script), "--devices-per-server", "2")
    assert code == 0
    lines = sorted(line.split() for line in out.splitlines())
    assert [line[:5] for line in lines] == [["0", "0", "0", "4", "2"], ["1", "1", "0", "4", "2"],
                                            ["2", "0", "1", "4", "2"], ["3", "1", "1", "4", "2"]]
    assert len({line[5] for line in lines} | {os.readlink("/proc/self/ns/net")}) == 5
    assert [line[6] for line in lines] == ["10.0.1.1/16", "10.0.1.2/16", "10.0.2.1/16", "10.0.2.2/16"]
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == host


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two servers")
def test_servers_run_on_cores_of_their_own():
    code, out, err = run([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"])
    assert code == 0, err
    first, second = (ast.literal_eval(line) for line in out.splitlines())
    assert first and second and not first & second


def measured(pairs: str, *flags: str, megabytes: float, **options) -> list[dict]:
    environment = dict(os.environ, STREAMS=pairs, MEGABYTES=str(megabytes))
    code, out, err = run([sys.executable, str(PROGRAMS / "tcp_streams.py")], *flags, env=environment, **options)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def together_gbps(streams: list[dict]) -> float:
    """What all streams carried, over the time from the first start to the last end."""
    duration_s = max(stream["ended_s"] for stream in streams) - min(stream["started_s"] for stream in streams)
    return sum(stream["bytes"] for stream in streams) * 8 / duration_s / 1e9


def check_rate(pairs: str, *flags: str, above: float, below: float = float("inf"), **options) -> None:
    """A loaded machine may be slower than its links, so one of a few tries is enough; it must never be faster.

    What a stream lacks for TCP's headers is 4.4 %.
    """
    tries_gbps = []
    for _ in range(5):
        tries_gbps.append(together_gbps(measured(pairs, *flags, **options)))
        assert tries_gbps[-1] < below
        if tries_gbps[-1] > above:
            return
    raise AssertionError(f"never above {above}: {tries_gbps}")


def test_one_stream_gets_the_nics_bandwidth():
    check_rate("0>1", megabytes=20, gbps=0.2, above=0.15, below=0.205)


# The other ends of the two streams are on two servers, so it is the shared NIC that limits them.
@pytest.mark.parametrize("pairs", ["0>2 1>4", "2>0 4>1"], ids=["out", "in"])
def test_devices_of_one_server_share_its_nic_in_each_direction(pairs):
    check_rate(pairs, "--devices-per-server", "2", servers=3, megabytes=10, gbps=0.2, above=0.12, below=0.205)


def test_the_two_directions_of_a_nic_do_not_share():
    check_rate("0>2 3>1", "--devices-per-server", "2", megabytes=10, gbps=0.2, above=0.22, below=0.41)


@pytest.mark.parametrize("pairs", ["0>1 0>2", "1>0 2>0"], ids=["out", "in"])
def test_a_device_has_a_rate_of_its_own_inside_its_server(pairs):
    flags = ("--devices-per-server", "3", "--intra-gbps", "0.4")
    check_rate(pairs, *flags, servers=1, megabytes=10, gbps=0.1, above=0.15, below=0.41)


def test_links_inside_a_server_are_not_limited_by_default():
    check_rate("0>1", "--devices-per-server", "2", servers=1, megabytes=100, gbps=0.1, above=0.3)


def test_gloo_all_reduce_takes_the_time_of_its_bytes_and_stays_outside_the_quota():
    program = [sys.executable, str(PROGRAMS / "all_reduce.py")]
    code, out, err = run(program, "--device-speed", "0.5", gbps=0.5)
    assert code == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == 2
    ideal_ms = 2 * 2**20 * 8 / 0.5e9 * 1e3  # two ranks: each sends as much as the tensor holds
    for result in results:
        assert ideal_ms * 0.95 < result["fastest_ms"] < ideal_ms * 4  # the upper bound leaves room for other load
        groups = result["cgroup_of_thread_kind"]
        assert groups["compute"] != groups["communication"]
        assert groups["compute"].endswith(f"/rank{result['rank']}")
        assert result["computed_cores"] < 0.6


def test_the_first_rank_to_fail_gives_the_exit_code_and_the_others_get_sigterm(tmp_path):
    script = f"""
        if [ $RANK = 1 ]; then while [ ! -e {tmp_path}/ready ]; do sleep 0.05; done; exit 3; fi
        trap 'echo got TERM; exit 0' TERM; touch {tmp_path}/ready; while true; do sleep 0.05; done"""
    code, out, err = run(shell(script))
    assert code == 3
    assert out == "got TERM\n"
    assert len(re.findall("rank 1 .*exited with code 3", err)) == 1


def test_a_rank_killed_in_mid_run_ends_the_run():
    code, _, err = run(shell("if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 1000"))
    assert code == 128 + signal.SIGKILL
    assert "rank 1 (server 1, device 0) was killed by SIGKILL" in err


def test_a_second_signal_kills_ranks_that_ignore_the_first():
    tool = start(shell("trap '' TERM; echo ready; while true; do sleep 0.05; done"))
    for _ in range(2):
        assert tool.stdout.readline() == "ready\n"
    tool.send_signal(signal.SIGTERM)
    assert "SIGTERM" in tool.stderr.readline() + tool.stderr.readline()
    tool.send_signal(signal.SIGTERM)
    code, _, err = finish(tool)
    assert code == 128 + signal.SIGTERM
    assert err == "emulate_cluster: got SIGTERM again; killing the ranks\n"


@pytest.mark.parametrize(
    "ending", ["normal", "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGKILL of a rank", "SIGKILL of the watchdog"]
)
def test_nothing_is_left_however_a_run_ends(ending):
    """Not even a process that has left its rank's session."""
    ends_normally = ending in ("normal", "SIGKILL of the watchdog")
    script = f"setsid sleep 1000 & echo $(readlink /proc/self/ns/net) $$; sleep {1 if ends_normally else 1000}"
    tool = start(shell(script), "--device-speed", "0.5")
    ranks = [tool.stdout.readline().split() for _ in range(2)]
    namespaces = {namespace for namespace, _ in ranks}
    assert holders_of(namespaces), "the test must be able to see what it looks for"
    assert cgroups_of(tool)
    if ending == "SIGKILL of a rank":
        os.kill(int(ranks[0][1]), signal.SIGKILL)
    elif ending == "SIGKILL of the watchdog":
        os.kill(watchdog_of(tool), signal.SIGKILL)
    elif not ends_normally:
        tool.send_signal(signal.Signals[ending])
    code, _, _ = finish(tool)
    if ends_normally:
        assert code == 0
    elif ending == "SIGKILL":
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + (signal.SIGKILL if ending == "SIGKILL of a rank" else signal.Signals[ending])
    if ending == "SIGKILL":
        assert eventually(lambda: not holders_of(namespaces)), holders_of(namespaces)
        assert eventually(lambda: not cgroups_of(tool)), cgroups_of(tool)
    assert not holders_of(namespaces)
    assert not cgroups_of(tool)


def test_two_runs_at_once_do_not_see_each_other():
    streams = dict(os.environ, STREAMS="0>1", MEGABYTES="5")
    program = [sys.executable, str(PROGRAMS / "tcp_streams.py")]
    tools = [start(program, "--device-speed", "0.4", gbps=gbps, env=streams) for gbps in (0.1, 0.2)]
    results = [finish(tool) for tool in tools]
    assert [code for code, _, _ in results] == [0, 0]
    slow, fast = (json.loads(out) for _, out, _ in results)
    assert not set(slow["namespaces"]) & set(fast["namespaces"])
    assert together_gbps([slow]) < 0.105
    assert together_gbps([fast]) < 0.205


def test_output_can_carry_the_rank():
    script = "setsid sleep 1000 & echo out; echo err >&2; seq 1 100000; printf unfinished"
    tool = start(shell(script), "--prefix-output")
    time.sleep(2)  # a slow reader: the ranks end, and most of what they printed is still to come
    code, out, err = finish(tool)
    assert code == 0
    assert len(out.splitlines()) == 2 * 100_002
    assert all(line.startswith("[rank ") for line in out.splitlines())
    assert sorted(re.findall(r"\[rank \d\] out\n", out)) == ["[rank 0] out\n", "[rank 1] out\n"]
    assert sorted(re.findall(r"\[rank \d\] err\n", err)) == ["[rank 0] err\n", "[rank 1] err\n"]
    assert out.count("unfinished") == 2


@pytest.mark.parametrize("flags", [["--servers", "0"], ["--servers", "2", "--device-speed", "1000"]])
def test_a_bad_flag_is_one_line_and_code_2(flags):
    command = [sys.executable, TOOL, "--nic-gbps", "1", *flags, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert flags[-2] in done.stderr


def test_a_command_that_does_not_exist_is_one_line():
    code, out, err = run(["no-such-command"])
    assert (code, out) == (2, "")
    assert err == "error: no such command: no-such-command\n"


def test_a_command_that_cannot_run_is_one_line(tmp_path):
    command = tmp_path / "command"
    command.write_text("neither a program nor a script")
    command.chmod(0o755)
    code, out, err = run([str(command)], "--prefix-output")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"error: cannot run {command}: Exec format error"
