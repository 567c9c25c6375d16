"""Two gloo ranks: the time of an all-reduce of 2 MiB, the cgroup of each kind of thread, the cores a loop may use."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def fastest_all_reduce_ms(repeats: int = 8) -> float:
    tensor = torch.zeros(2 * 2**20 // 4)
    times_ms = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return min(times_ms)


def computed_cores() -> float:
    """Thread time over wall time of a busy loop."""
    started, cpu_started = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < 1.0:
        sum(range(1000))
    return (time.thread_time() - cpu_started) / (time.perf_counter() - started)


def cgroup_of_thread_kind() -> dict[str, str]:
    groups = {}
    for task in Path("/proc/self/task").iterdir():
        lines = [line.split(":") for line in (task / "cgroup").read_text().split()]
        path = next((path for _, kind, path in lines if "cpu" in kind.split(",")), lines[-1][2])
        name = (task / "comm").read_text()
        groups["communication" if name.startswith(("gloo", "pt_gloo")) else "other"] = path
        if int(task.name) == os.getpid():
            groups["compute"] = path
    return groups


dist.init_process_group("gloo")
fastest_ms = fastest_all_reduce_ms()
cores = computed_cores()
result = {
    "rank": dist.get_rank(),
    "fastest_ms": fastest_ms,
    "computed_cores": cores,
    "cgroup_of_thread_kind": cgroup_of_thread_kind(),
}
sys.stdout.write(json.dumps(result) + "\n")  # in one piece: the ranks share the output
dist.destroy_process_group()
