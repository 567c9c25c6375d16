"""Cluster files are refused in one line, and times follow from which links a collective shares with others."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron.oases.cost.cluster import Cluster, Device, Link, Links
from megatron.oases.cost.cluster_file import load_cluster, shipped_clusters
from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.topology import Topology
from megatron.oases.errors import UsageError

FOLDER = Path(__file__).parents[2] / "clusters"
SHIPPED = ["a100_pcie_x8", "emulated", "h100_sxm_x8", "l40s_x8", "rtx3090x4", "rtx3090x4_nvlink", "rtx4090x8"]
# 1 byte a nanosecond, that is 10^6 bytes a ms, and no latency to speak of.
PLAIN = Link(bandwidth_gbps=8, efficiency=1, latency_us=1e-9)
MEGABYTE = 10**6


def cluster(servers: int, devices_per_server: int, **links: Link) -> Cluster:
    return Cluster(
        name="test",
        servers=servers,
        devices_per_server=devices_per_server,
        backend="gloo",
        device=Device(
            name="test",
            memory_gib=1,
            memory_gb_per_s=1,
            memory_efficiency=1,
            multiprocessors=1,
            launch_us=1,
            peak_tflops={"fp32": 1},
            achievable_tflops={"fp32": 1},
        ),
        links=Links(**links),
        contention=Contention(),
        iteration_overhead_ms=1,
    )


def time_ms(where: Cluster, group: Group, collective=Collective.ALL_REDUCE, size_bytes=MEGABYTE, ranks=None) -> float:
    return Topology(where, ranks or where.world_size).collective_ms(collective, group, size_bytes)


# Files.


def test_what_is_shipped():
    assert shipped_clusters() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_load_by_name_and_by_path(name):
    loaded = load_cluster(name)
    assert loaded.name == name
    assert loaded == load_cluster(FOLDER / f"{name}.yaml")
    for size in (2, loaded.devices_per_server, loaded.world_size):
        if size > 1:
            assert time_ms(loaded, Group(size)) > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_numbers_in_shipped_files_name_their_source(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    settled_by_the_name = ("servers", "devices_per_server", "version", "multiprocessors: 1", "  peak")
    for before, line in zip(lines, lines[1:]):
        is_number = re.match(r"\s*\w+: *[\d.]+ *$", line)
        heads_group = "peak_tflops" in before or re.match(r"    (fp32|tf32|bf16)", before)
        assert not is_number or heads_group or line.strip().startswith(settled_by_the_name), line


def content() -> dict:
    return yaml.safe_load((FOLDER / "rtx3090x4.yaml").read_text())


def written(tmp_path: Path, changed: dict | str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(changed if isinstance(changed, str) else yaml.safe_dump(changed))
    return path


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("version", 2, "version is 2; this tool reads version 1"),
        ("version", None, "version is null; this tool reads version 1"),
        ("servers", 0, "servers 0 must be a finite number above 0"),
        ("servers", 1.5, "servers must be a whole number, not 1.5"),
        ("servers", True, "servers must be a whole number, not True"),
        ("servers", 10**400, "servers must fit into 64 bits, not a number of 1329 bits"),
        ("name", "", "name is empty"),
        ("device.memory_gib", -3, "device: memory_gib -3 must be a finite number above 0"),
        ("device.memory_gib", "24G", "device: memory_gib must be a number, not '24G'"),
        ("device.memory_gib", float("nan"), "device: memory_gib must be a finite number, not nan"),
        ("device.memory_gib", 10**400, "device: memory_gib must be a finite number, not a number of 1329 bits"),
        ("device.memory_efficiency", 85, "device: memory_efficiency 85 is a share, must be at most 1"),
        ("device.colour", "red", "device: colour is unknown; there are name, memory_gib"),
        ("device.peak_tflops.fp8", 1, "device: peak_tflops.fp8 is unknown, must be one of fp32, tf32, bf16, fp16"),
        ("device.peak_tflops", {}, "device: peak_tflops is empty, must name at least one of fp32, tf32, bf16, fp16"),
        ("device.peak_tflops", 5, "device: peak_tflops must be an object, not 5"),
        ("device.achievable_tflops.tf32", 40, "device: achievable_tflops.tf32 40 is above peak_tflops.tf32 35.6"),
        ("device.achievable_tflops.tf32", -1, "device: achievable_tflops.tf32 -1 must be a finite number above 0"),
        ("device.achievable_tflops.tf32", ..., "device: peak_tflops has bf16, fp16, fp32, tf32, but achievable_tflops"),
        ("device", ..., "device is missing"),
        ("device", None, "device must be an object, not null"),
        ("links.nic.bandwidth_gbps", float("inf"), "links: nic: bandwidth_gbps must be a finite number, not inf"),
        ("links.nic.latency_us", ..., "links: nic: latency_us is missing"),
        ("links.nic.efficiency", [1], "links: nic: efficiency must be a number, not [1]"),
        ("links.nic", ..., "links.nic is missing, but servers is 8"),
        ("backend", "mpi", "backend 'mpi' is none of gloo, nccl"),
        ("links.port", ..., "links.port is missing, but devices_per_server is 4"),
        ("contention.compute", 0.9, "contention.compute 0.9 must be a finite number of at least 1"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_key_and_value(tmp_path, path, value, message):
    changed = content()
    *parents, key = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    file = written(tmp_path, changed)
    with pytest.raises(UsageError) as error:
        load_cluster(file)
    assert str(error.value).startswith(f"{file}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must hold an object, not null"),
        ("- 1", "must hold an object, not [1]"),
        ("version: 1\nname: [", "not valid YAML in line 2"),
        ("version: 1\nname: a\nname: b\n", "not valid YAML in line 3: key name is given twice"),
        ("version: 1\n? [a]\n: b\n", "not valid YAML in line 2: a key is not plain text"),
        ("version: 1\nname: a\x00b\n", "cannot be read"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        load_cluster(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_bridges_need_pairs(tmp_path):
    changed = yaml.safe_load((FOLDER / "rtx3090x4_nvlink.yaml").read_text()) | {"devices_per_server": 3}
    with pytest.raises(UsageError, match="links.bridge joins pairs, but devices_per_server is 3"):
        load_cluster(written(tmp_path, changed))


def test_a_name_that_is_neither_shipped_nor_a_file(tmp_path):
    with pytest.raises(UsageError, match="cluster rtx3090x5 is no file, nor the name .* rtx3090x4, "):
        load_cluster("rtx3090x5")
    with pytest.raises(UsageError, match="is a folder"):
        load_cluster(tmp_path)


# Times.


def test_a_ring_all_reduce_takes_its_textbook_time():
    link = Link(bandwidth_gbps=8, efficiency=0.5, latency_us=100)
    # 2 x 3 steps, each of 0.1 ms and a quarter of the bytes at half of 10^6 bytes a ms.
    assert time_ms(cluster(1, 4, port=link), Group(4)) == pytest.approx(6 * (0.1 + 0.25 / 0.5))
    assert time_ms(cluster(1, 4, port=link), Group(4), Collective.ALL_GATHER) == pytest.approx(3 * (0.1 + 0.25 / 0.5))
    assert time_ms(cluster(1, 4, port=link), Group(4), Collective.SEND) == pytest.approx(0.1 + 1 / 0.5)
    # Each port takes three quarters of the bytes in each direction.
    assert time_ms(cluster(1, 4, port=link), Group(4), Collective.ALL_TO_ALL) == pytest.approx(3 * 0.1 + 0.75 / 0.5)


@pytest.mark.parametrize("nic_gbps, measured_ms", [(1, 17.2), (0.5, 34.9), (0.25, 69.8)])
def test_the_emulated_clusters_all_reduce_is_as_measured(nic_gbps, measured_ms):
    emulated = load_cluster("emulated")
    nic = replace(emulated.links.nic, bandwidth_gbps=nic_gbps)
    predicted_ms = time_ms(replace(emulated, links=Links(nic=nic)), Group(2), size_bytes=2 * 2**20)
    assert predicted_ms == pytest.approx(measured_ms, rel=0.02)


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("name", SHIPPED)
def test_one_rank_communicates_nothing_and_more_bytes_take_longer(name, collective):
    where = load_cluster(name)
    assert time_ms(where, Group(1), collective) == 0
    assert time_ms(where, Group(2), collective, 0) == 0
    times = [time_ms(where, Group(2), collective, size) for size in (1, 1024, 2**20, 2**30)]
    assert times == sorted(times) and len(set(times)) == 4


@pytest.mark.parametrize("group", [Group(2), Group(4), Group(8), Group(2, stride=4), Group(4, stride=2)])
@pytest.mark.parametrize("name", set(SHIPPED) - {"emulated"})
def test_an_all_reduce_takes_as_long_as_a_reduce_scatter_and_an_all_gather(name, group):
    where = load_cluster(name)
    reduce_scatter = time_ms(where, group, Collective.REDUCE_SCATTER)
    assert time_ms(where, group, Collective.ALL_GATHER) == reduce_scatter
    assert time_ms(where, group) == pytest.approx(2 * reduce_scatter)


@pytest.mark.parametrize("group", [Group(2), Group(4), Group(8), Group(2, stride=4), Group(8, stride=4)])
@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("slower", ["port", "host", "bridge", "nic"])
@pytest.mark.parametrize("change", [{"bandwidth_gbps": 1}, {"efficiency": 0.01}, {"latency_us": 1000}])
def test_a_slower_link_is_never_faster(group, collective, slower, change):
    where = load_cluster("rtx3090x4_nvlink")
    links = replace(where.links, **{slower: replace(getattr(where.links, slower), **change)})
    assert time_ms(replace(where, links=links), group, collective) >= time_ms(where, group, collective)


def test_groups_that_share_a_link_slow_each_other_down():
    shared = cluster(1, 8, port=PLAIN, host=replace(PLAIN, bandwidth_gbps=16))
    alone, together = time_ms(shared, Group(4), ranks=4), time_ms(shared, Group(4))
    assert together == pytest.approx(2 * alone)
    switched = cluster(1, 8, port=PLAIN)
    assert time_ms(switched, Group(4)) == time_ms(switched, Group(4), ranks=4)


def test_devices_of_a_server_share_its_nic():
    where = cluster(2, 4, port=PLAIN, nic=PLAIN)
    # Four groups, each with one rank on either server: four flows over the card. A ring of all crosses it once.
    assert time_ms(where, Group(2, stride=4)) == pytest.approx(4 * 1)
    assert time_ms(where, Group(8)) == pytest.approx(14 / 8)
    assert time_ms(where, Group(4)) == pytest.approx(6 / 4)  # within servers, no card involved


def test_a_card_carries_both_directions_at_once():
    assert time_ms(cluster(2, 1, nic=PLAIN), Group(2)) == pytest.approx(1)


def test_bridges_help_the_pairs_that_they_join():
    slow = replace(PLAIN, bandwidth_gbps=1)
    bridged, plain = cluster(1, 4, port=slow, bridge=PLAIN), cluster(1, 4, port=slow)
    assert time_ms(bridged, Group(2)) == pytest.approx(time_ms(plain, Group(2)) / 8)
    assert time_ms(bridged, Group(2, stride=2)) == time_ms(plain, Group(2, stride=2))
    assert time_ms(bridged, Group(4)) == time_ms(plain, Group(4))  # a ring is as fast as its slowest link


def test_a_job_may_use_a_part_of_the_cluster_but_not_more():
    assert Topology(cluster(4, 1, nic=PLAIN), 2).collective_ms(Collective.ALL_REDUCE, Group(2), MEGABYTE) > 0
    with pytest.raises(ValueError, match="8 ranks on 4 devices"):
        Topology(cluster(4, 1, nic=PLAIN), 8)
    with pytest.raises(ValueError, match="4 ranks are not groups of 3 ranks, 1 apart"):
        time_ms(cluster(4, 1, nic=PLAIN), Group(3))
