"""The cluster to emulate: how many servers and devices, how fast their links are, and which rank sits where."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.oases.errors import UsageError
from megatron.oases.sizes import counted

MASTER_PORT = 29500
DEVICE_INTERFACE = "eth0"
# Slower, a run would take for ever; faster, no kernel moves the bytes, and the link would not be emulated.
_SLOWEST_GBPS, _FASTEST_GBPS = 1e-4, 1000.0
_MAX_PER_LEVEL = 200  # one octet of an address for the server, one for the device; a Linux bridge takes 1023 ports


@dataclass(frozen=True, kw_only=True)
class Device:
    """One emulated device: it runs the rank of the same number."""

    rank: int
    server: int
    local_rank: int

    @property
    def address(self) -> str:
        return f"10.0.{self.server + 1}.{self.local_rank + 1}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of equal shape. Each has a bridge, and one NIC that its devices share, to one switch.

    Attributes:
        nic_gbps: bandwidth of each server's NIC, in Gbit/s, in each direction.
        intra_gbps: bandwidth between a device and its server's bridge, each direction; None leaves it unshaped.
        device_speed: cores that each rank's computing may use; None leaves it unlimited.
    """

    servers: int
    devices_per_server: int
    nic_gbps: float
    intra_gbps: float | None = None
    device_speed: float | None = None

    def __post_init__(self):
        for flag, count in (("--servers", self.servers), ("--devices-per-server", self.devices_per_server)):
            if not 1 <= count <= _MAX_PER_LEVEL:
                raise UsageError(f"{flag} {count} must be from 1 to {_MAX_PER_LEVEL}")
        for flag, gbps in (("--nic-gbps", self.nic_gbps), ("--intra-gbps", self.intra_gbps)):
            if gbps is not None:
                check_bandwidth(flag, gbps)
        speed = self.device_speed
        if speed is not None and not (math.isfinite(speed) and speed > 0):
            raise UsageError(f"--device-speed {speed:g} must be a finite number above 0")

    @property
    def world_size(self) -> int:
        return self.servers * self.devices_per_server

    @property
    def devices(self) -> list[Device]:
        """In order of rank: server by server, as torchrun numbers them."""
        return [
            Device(rank=server * self.devices_per_server + local_rank, server=server, local_rank=local_rank)
            for server in range(self.servers)
            for local_rank in range(self.devices_per_server)
        ]

    def cores_of(self, server: int, cores: Iterable[int]) -> frozenset[int]:
        """Those of the machine's cores that are a server's own; all of them where there are fewer than servers."""
        cores = sorted(cores)
        own = len(cores) // self.servers
        return frozenset(cores[server * own : (server + 1) * own] or cores)

    def check_fits(self, cores: int) -> None:
        """Refuses device speeds that the machine's cores cannot give to all ranks at once."""
        if self.device_speed is None:
            return
        needed = self.world_size * self.device_speed
        if needed > cores:
            raise UsageError(
                f"--device-speed {self.device_speed:g} x {self.world_size} ranks = {needed:g} cores, but this machine "
                f"has {cores}; use at most {cores / self.world_size:g}"
            )

    def describe(self, cores: int) -> str:
        """One line for the user: what is emulated, and what would make its times mislead."""
        parts = [
            f"{counted(self.servers, 'server')} x {counted(self.devices_per_server, 'device')}",
            f"NIC {self.nic_gbps:g} Gbit/s each way",
        ]
        if self.intra_gbps:
            parts.append(f"inside a server {self.intra_gbps:g} Gbit/s")
        elif self.devices_per_server > 1:
            parts.append("links inside a server unshaped")
        if self.device_speed is not None:
            parts.append(f"{self.device_speed:g} core a device")
        elif self.world_size > cores:
            parts.append(
                f"{self.world_size} ranks share {cores} cores, so a waiting rank speeds up the others: "
                f"--device-speed {cores / self.world_size:g} prevents it"
            )
        return ", ".join(parts)


def check_bandwidth(flag: str, gbps: float) -> None:
    if not _SLOWEST_GBPS <= gbps <= _FASTEST_GBPS:
        raise UsageError(f"{flag} {gbps:g} must be from {_SLOWEST_GBPS:g} to {_FASTEST_GBPS:g} Gbit/s")


def rank_environment(cluster: Cluster, device: Device, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of one rank: `base` with what torchrun would set, and gloo bound to the emulated link."""
    environment = dict(base)
    # Left by an enclosing torchrun, this makes rank 0 wait for a store that somebody else was to open.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    environment.update(
        RANK=str(device.rank),
        LOCAL_RANK=str(device.local_rank),
        GROUP_RANK=str(device.server),
        WORLD_SIZE=str(cluster.world_size),
        LOCAL_WORLD_SIZE=str(cluster.devices_per_server),
        GROUP_WORLD_SIZE=str(cluster.servers),
        MASTER_ADDR=cluster.devices[0].address,
        MASTER_PORT=str(MASTER_PORT),
        GLOO_SOCKET_IFNAME=DEVICE_INTERFACE,
    )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // cluster.world_size)))
    # A device is a CPU process here. Ranks that shared a real GPU would meet in its memory, past the emulated links.
    environment.setdefault("CUDA_VISIBLE_DEVICES", "")
    # No name server is reachable from a namespace; c10d would warn of that at every connection.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environment
