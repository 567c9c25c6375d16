import os
import shutil

import pytest

from megatron.oases.command_line import split_at_double_dash
from megatron.oases.emulation import network
from megatron.oases.emulation.cluster import Cluster, rank_environment
from megatron.oases.emulation.cpu_quota import CpuController
from megatron.oases.emulation.network import TokenBucket
from megatron.oases.errors import UsageError
from tools.emulate_cluster import parse_arguments


def cluster(**changes) -> Cluster:
    return Cluster(**{"servers": 2, "devices_per_server": 2, "nic_gbps": 0.5} | changes)


def test_ranks_are_numbered_server_by_server():
    devices = cluster(servers=2, devices_per_server=3).devices
    assert [device.rank for device in devices] == list(range(6))
    places = [(device.server, device.local_rank) for device in devices]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_addresses_are_unique_up_to_the_largest_cluster():
    devices = cluster(servers=200, devices_per_server=200).devices
    assert len({device.address for device in devices}) == 200 * 200
    assert all(1 <= int(octet) <= 254 for device in devices for octet in device.address.split(".")[2:])


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"servers": 0}, "--servers 0"),
        ({"servers": -1}, "--servers -1"),
        ({"devices_per_server": 0}, "--devices-per-server 0"),
        ({"devices_per_server": 201}, "--devices-per-server 201"),
        ({"nic_gbps": 0.0}, "--nic-gbps 0"),
        ({"nic_gbps": -0.5}, "--nic-gbps -0.5"),
        ({"nic_gbps": 5e-5}, "--nic-gbps 5e-05 must be from 0.0001 to 1000 Gbit/s"),
        ({"nic_gbps": 1001.0}, "--nic-gbps 1001"),
        ({"nic_gbps": float("nan")}, "--nic-gbps nan"),
        ({"intra_gbps": float("inf")}, "--intra-gbps inf"),
        ({"intra_gbps": 0.0}, "--intra-gbps 0"),
        ({"device_speed": -1.0}, "--device-speed -1"),
    ],
)
def test_an_impossible_cluster_names_the_flag(changes, flag):
    with pytest.raises(UsageError) as error:
        cluster(**changes)
    assert flag in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("servers", "cores", "expected"),
    [
        (2, {0, 1}, [{0}, {1}]),
        (2, {0, 2, 4, 6, 7}, [{0, 2}, {4, 6}]),
        (3, {0, 1}, [{0, 1}] * 3),  # too few to have any of one's own
    ],
)
def test_servers_have_cores_of_their_own(servers, cores, expected):
    assert [cluster(servers=servers).cores_of(server, cores) for server in range(servers)] == expected


def test_device_speeds_must_fit_on_the_cores():
    cluster(device_speed=0.5).check_fits(cores=2)
    with pytest.raises(UsageError, match=r"0.6 x 4 ranks = 2.4 cores, but this machine has 2; use at most 0.5"):
        cluster(device_speed=0.6).check_fits(cores=2)


def test_links_inside_a_server_are_told_where_there_are_any():
    assert "links inside a server unshaped" in cluster().describe(cores=4)
    assert "inside a server 8 Gbit/s" in cluster(intra_gbps=8.0).describe(cores=4)
    assert "inside" not in cluster(devices_per_server=1).describe(cores=4)


def test_more_ranks_than_cores_is_said():
    assert "4 ranks share 2 cores" in cluster().describe(cores=2)
    assert "share" not in cluster().describe(cores=4)
    assert "share" not in cluster(device_speed=0.5).describe(cores=2)


def test_environment_of_a_rank():
    shape = cluster(servers=2, devices_per_server=2)
    environment = rank_environment(shape, shape.devices[3], {"PATH": "/bin", "RANK": "7"}, cores=8)
    expected = {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": shape.devices[0].address,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "2",
    }
    assert {name: environment[name] for name in expected} == expected


def test_environment_keeps_the_users_threads_and_drops_an_enclosing_torchrun():
    shape = cluster()
    base = {"OMP_NUM_THREADS": "5", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = rank_environment(shape, shape.devices[0], base, cores=2)
    assert environment["OMP_NUM_THREADS"] == "5"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
    assert base == {"OMP_NUM_THREADS": "5", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize("gbps", [0.001, 0.01, 0.1, 0.5, 1, 10, 100])
def test_segments_fit_in_the_bucket_with_their_headers(gbps):
    bucket = TokenBucket.of_rate(gbps)
    assert bucket.rate_bps == gbps * 1e9
    packets = bucket.segment_bytes / 1448
    assert bucket.segment_bytes + (packets + 1) * 66 <= bucket.burst_bytes
    assert bucket.segment_bytes <= 64 * 1024


def test_a_bucket_holds_little_time():
    assert TokenBucket.of_rate(0.5).burst_bytes * 8 / 0.5e9 <= 2e-3


V1_MOUNTS = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
V2_MOUNTS = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"


def test_the_cpu_controller_is_found_in_either_version_of_cgroups():
    v1 = CpuController.find(V1_MOUNTS, unified_controllers="hugetlb")
    assert (v1.version, str(v1.mount), v1.threads_file) == (1, "/sys/fs/cgroup/cpu", "tasks")
    v2 = CpuController.find(V2_MOUNTS, unified_controllers="cpuset cpu io")
    assert (v2.version, str(v2.mount), v2.threads_file) == (2, "/sys/fs/cgroup", "cgroup.threads")


def test_a_missing_cpu_controller_is_a_users_error():
    with pytest.raises(UsageError, match="--device-speed"):
        CpuController.find(V2_MOUNTS, unified_controllers="cpuset io")


def test_missing_iproute2_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(UsageError, match=r"iproute2 \(ip and tc not found"):
        network.check_tools()


def test_missing_root_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root.*user 1000"):
        network.check_tools()


def test_the_command_starts_after_the_first_double_dash():
    assert split_at_double_dash(["--servers", "2", "--", "a", "--", "b"]) == (["--servers", "2"], ["a", "--", "b"])
    assert split_at_double_dash(["--servers", "2"]) == (["--servers", "2"], [])


def test_arguments():
    shape, command, prefix = parse_arguments(["--servers", "2", "--nic-gbps", "0.5", "--", "run", "--servers", "9"])
    assert shape == Cluster(servers=2, devices_per_server=1, nic_gbps=0.5)
    assert command == ["run", "--servers", "9"]
    assert prefix is False


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--servers", "2", "--nic-gbps", "1"], "no command"),
        (["--servers", "2", "--nic-gbps", "1", "--"], "no command"),
        (["--servers", "2", "--nic-gbps", "1", "python", "x.py", "--lr"], "put `--` before the command: -- python ..."),
        (["--servers", "2", "--nic-gbps", "1", "--unknown", "1", "--", "true"], "unrecognized arguments: --unknown 1"),
        (["--servers", "2", "--nic-gbps", "1", "stray", "--", "true"], "unrecognized arguments: stray"),
        (["--servers", "two", "--nic-gbps", "1", "--", "true"], "--servers"),
        (["--servers", "2", "--", "true"], "--nic-gbps"),
        (["--servers", "2", "--nic-gbps", "1", "--latency", "3", "--", "true"], "--latency"),
        (["--server", "2", "--nic-gbps", "1", "--", "true"], "--server"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, part):
    with pytest.raises(UsageError) as error:
        parse_arguments(argv)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
