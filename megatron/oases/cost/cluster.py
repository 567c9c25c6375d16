"""A cluster as a cost model sees it: servers of equal shape, their devices, and the links between them.

Ranks are placed server by server: rank r is device r % devices_per_server of server r // devices_per_server.
"""

import math
from dataclasses import dataclass, fields

from megatron.oases.cost.model import Contention

DTYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Args:
        name: as its vendor calls it.
        memory_gib: in GiB.
        memory_gb_per_s: peak bandwidth of its memory, in 10^9 bytes a second.
        memory_efficiency: the share of that which elementwise kernels reach.
        multiprocessors: units that each compute a tile of a matrix product (SMs, or cores of a CPU).
        launch_us: time of the host for one kernel, in microseconds.
        peak_tflops: by dtype, dense, in 10^12 operations a second.
        achievable_tflops: by dtype: what large matrix products reach.
    """

    name: str
    memory_gib: float
    memory_gb_per_s: float
    memory_efficiency: float
    multiprocessors: int
    launch_us: float
    peak_tflops: dict[str, float]
    achievable_tflops: dict[str, float]

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_share("memory_efficiency", self.memory_efficiency)
        for key in ("peak_tflops", "achievable_tflops"):
            speeds = getattr(self, key)
            if not speeds:
                raise ValueError(f"{key} is empty, must name at least one of {', '.join(DTYPES)}")
            for dtype, speed in speeds.items():
                if dtype not in DTYPES:
                    raise ValueError(f"{key}.{dtype} is unknown, must be one of {', '.join(DTYPES)}")
                _check_number(f"{key}.{dtype}", speed)
        if self.peak_tflops.keys() != self.achievable_tflops.keys():
            peaks, achievables = ", ".join(self.peak_tflops), ", ".join(self.achievable_tflops)
            raise ValueError(f"peak_tflops has {peaks}, but achievable_tflops has {achievables}")
        for dtype, peak in self.peak_tflops.items():
            if self.achievable_tflops[dtype] > peak:
                achievable = self.achievable_tflops[dtype]
                raise ValueError(f"achievable_tflops.{dtype} {achievable:g} is above peak_tflops.{dtype} {peak:g}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A full-duplex link.

    Args:
        bandwidth_gbps: nominal, in Gbit/s, in each direction.
        efficiency: the share of it that a collective's payload gets.
        latency_us: of one step of a collective over it, in microseconds.
    """

    bandwidth_gbps: float
    efficiency: float
    latency_us: float

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_share("efficiency", self.efficiency)

    @property
    def bytes_per_ms(self) -> float:
        """Payload in each direction."""
        return self.bandwidth_gbps * self.efficiency * 1e9 / 8 / 1e3


@dataclass(frozen=True, kw_only=True)
class Links:
    """What joins the devices.

    Args:
        port: each device's own link into its server. Not needed with one device a server.
        host: what all ports of a server share (PCIe switch, root complex, host memory). Without it, ports run at full
            speed all at once.
        bridge: joins devices 0 and 1, 2 and 3, … of a server. What goes over it uses neither port nor host.
        nic: what the devices of a server share on the way to other servers. Not needed with one server.
    """

    port: Link | None = None
    host: Link | None = None
    bridge: Link | None = None
    nic: Link | None = None


_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of equal shape.

    Args:
        name: a short name.
        servers: their number.
        devices_per_server: devices of each.
        backend: of the collectives: `gloo` between CPUs, `nccl` between GPUs.
        device: what they all are.
        links: what joins them.
        contention: of computation and a collective that run at the same time on one device.
        iteration_overhead_ms: what an iteration takes beside computation and collectives.
    """

    name: str
    servers: int
    devices_per_server: int
    backend: str
    device: Device
    links: Links
    contention: Contention
    iteration_overhead_ms: float

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend {self.backend!r} is none of {', '.join(_BACKENDS)}")
        for field in fields(self.contention):
            factor = getattr(self.contention, field.name)
            if not (math.isfinite(factor) and factor >= 1):
                raise ValueError(f"contention.{field.name} {factor:g} must be a finite number of at least 1")
        if self.devices_per_server > 1 and self.links.port is None:
            raise ValueError(f"links.port is missing, but devices_per_server is {self.devices_per_server}")
        if self.servers > 1 and self.links.nic is None:
            raise ValueError(f"links.nic is missing, but servers is {self.servers}")
        if self.links.bridge is not None and self.devices_per_server % 2:
            raise ValueError(f"links.bridge joins pairs, but devices_per_server is {self.devices_per_server}")

    @property
    def world_size(self) -> int:
        return self.servers * self.devices_per_server


def _check_positive(instance) -> None:
    for field in fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, int | float):
            _check_number(field.name, value)
        elif value == "":
            raise ValueError(f"{field.name} is empty")


def _check_number(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key} {value:g} must be a finite number above 0")


def _check_share(key: str, value: float) -> None:
    if value > 1:
        raise ValueError(f"{key} {value:g} is a share, must be at most 1")
