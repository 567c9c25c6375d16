"""One emulated run from its first namespace to its exit code."""

import os
import secrets
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron.oases.emulation.cleanup import Watchdog
from megatron.oases.emulation.cluster import Cluster, Device, rank_environment
from megatron.oases.emulation.cpu_quota import CpuController, CpuQuotas
from megatron.oases.emulation.network import Network, check_tools, emulated_network
from megatron.oases.emulation.ranks import Rank, signals_as_bytes, start_rank, wait_for_ranks
from megatron.oases.errors import UsageError


def run_emulated(cluster: Cluster, command: list[str], *, prefix_output: bool = False) -> int:
    """Runs the command once per rank on the emulated cluster and returns its exit code."""
    cores = len(os.sched_getaffinity(0))
    cluster.check_fits(cores)
    check_tools()
    if shutil.which(command[0]) is None:
        raise UsageError(f"no such command: {command[0]}")
    _say(cluster.describe(cores))
    with ExitStack() as stack:
        stop_signals = stack.enter_context(signals_as_bytes())
        network = stack.enter_context(emulated_network(cluster))
        quotas = _quotas(cluster)
        cgroups = quotas.directory if quotas else None
        ranks: list[Rank] = []
        stack.callback(_print_the_rest, ranks)
        # Before anything exists that would outlive this process.
        stack.callback(Watchdog(network.descriptors, cgroups).close)
        if quotas:
            quotas.create()
        _start_ranks(ranks, cluster, network, quotas, command, prefix_output=prefix_output)
        on_tick = quotas.release_communication_threads if quotas else lambda: None
        return wait_for_ranks(ranks, stop_signals, on_tick=on_tick, say=_say)


def _quotas(cluster: Cluster) -> CpuQuotas | None:
    if cluster.device_speed is None:
        return None
    controller = CpuController.find(Path("/proc/self/mounts").read_text())
    name = f"oases-emulation-{os.getpid()}-{secrets.token_hex(4)}"
    return CpuQuotas(controller, name, cluster.world_size, cluster.device_speed)


def _start_ranks(
    ranks: list[Rank],
    cluster: Cluster,
    network: Network,
    quotas: CpuQuotas | None,
    command: list[str],
    *,
    prefix_output: bool,
) -> None:
    cores = os.sched_getaffinity(0)
    for device, namespace in zip(cluster.devices, network.devices, strict=True):
        environment = rank_environment(cluster, device, os.environ, len(cores))

        def take_place(device: Device = device) -> None:
            # Threads of one server cannot run on another's cores.
            os.sched_setaffinity(0, cluster.cores_of(device.server, cores))
            if quotas:
                quotas.enter(device.rank)

        try:
            with namespace.entered():
                rank = start_rank(device, command, environment, prefix_output=prefix_output, before_exec=take_place)
        except OSError as error:
            raise UsageError(f"cannot run {command[0]}: {error.strerror}") from None
        ranks.append(rank)
    # Threads only now: a thread keeps the namespace it was started in.
    for rank in ranks:
        for printer in rank.printers:
            printer.start()


def _print_the_rest(ranks: list[Rank]) -> None:
    """Ends once every process that could still print is gone."""
    for rank in ranks:
        for printer in rank.printers:
            if printer.is_alive():  # not started, if a rank could not be
                printer.join()


def _say(line: str) -> None:
    print(f"emulate_cluster: {line}", file=sys.stderr, flush=True)
