"""The emulated network: one namespace per device, and one more, the fabric, that holds every bridge.

    device namespace           fabric namespace
    eth0 ------- d<rank> --- br<server> --- up<server> ======= nic<server> --- sw
         intra                              the server's NIC

Namespaces are anonymous: this process holds them as file descriptors. The kernel removes a namespace, with its links,
bridges and queues, when the last descriptor and the last process in it are gone, so nothing can be left over, nothing
appears on the host, and no name or address can clash with another run.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.oases.emulation.cluster import DEVICE_INTERFACE, Cluster, Device
from megatron.oases.errors import UsageError

_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_BURST_S = 1.5e-3
_MIN_BURST_BYTES = 16 * 1024
_MAX_SEGMENT_BYTES = 64 * 1024
_QUEUE_BYTES = 64 * 1024 * 1024
_SEND_BUFFER_S = 10e-3
_SEND_BUFFER_LIMITS_BYTES = (256 * 1024, 4 * 1024 * 1024)
# The host may use BBR, whose probing makes times differ from run to run, or restart slowly after every computation.
# Reno is in every kernel, open to every namespace, and on a link that drops nothing as good as any.
_TCP_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}


@dataclass(frozen=True, kw_only=True)
class TokenBucket:
    """Parameters of a tc tbf queue.

    A bucket that holds 1.5 ms of traffic wakes the kernel's timer seldom, and lets an idle link run ahead by no more
    than that. The segments that TCP hands down must fit in it: tbf cuts larger ones to single packets, which takes
    ten times as many wake-ups, and on busy cores each of them comes late.

    The queue never drops. All that a socket may send ahead waits in it, in front of what the other devices of the
    server send, so the send buffers are kept short: 10 ms of the NIC's bandwidth. With the kernel's usual 4 MB, a small
    message behind a neighbour's large one took 70 ms.
    """

    rate_bps: int
    burst_bytes: int

    @classmethod
    def of_rate(cls, gbps: float) -> "TokenBucket":
        rate_bps = round(gbps * 1e9)
        return cls(rate_bps=rate_bps, burst_bytes=max(_MIN_BURST_BYTES, round(rate_bps / 8 * _BURST_S)))

    @property
    def segment_bytes(self) -> int:
        return min(_MAX_SEGMENT_BYTES, self.burst_bytes * 2 // 3)

    @property
    def send_buffer_bytes(self) -> int:
        least, most = _SEND_BUFFER_LIMITS_BYTES
        return min(most, max(least, round(self.rate_bps / 8 * _SEND_BUFFER_S)))

    def command(self, interface: str) -> str:
        sizes = f"burst {self.burst_bytes}b limit {_QUEUE_BYTES}b"
        return f"qdisc add dev {interface} root tbf rate {self.rate_bps}bit {sizes}"


@dataclass(frozen=True)
class Namespace:
    """A network namespace without a name, alive while its descriptor is open or a process is inside."""

    descriptor: int

    @classmethod
    def create(cls) -> "Namespace":
        own = os.open(_OWN_NAMESPACE, os.O_RDONLY)
        try:
            os.unshare(os.CLONE_NEWNET)
            return cls(os.open(_OWN_NAMESPACE, os.O_RDONLY))
        finally:
            os.setns(own, os.CLONE_NEWNET)
            os.close(own)

    @property
    def path(self) -> str:
        """For other processes, such as `ip`, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and the processes it starts, are inside."""
        own = os.open(_OWN_NAMESPACE, os.O_RDONLY)
        os.setns(self.descriptor, os.CLONE_NEWNET)
        try:
            yield
        finally:
            os.setns(own, os.CLONE_NEWNET)
            os.close(own)

    def configure(self, tool: str, commands: list[str]) -> None:
        """Runs the lines with `ip` or `tc` inside."""
        with self.entered():
            lines = "".join(f"{command}\n" for command in commands)
            done = subprocess.run([tool, "-batch", "-"], input=lines, text=True, capture_output=True)
        if done.returncode:
            raise UsageError(f"the kernel refused to build the emulated network: {tool}: {_one_line(done.stderr)}")


@dataclass(frozen=True, kw_only=True)
class Network:
    fabric: Namespace
    devices: tuple[Namespace, ...]  # by rank

    @property
    def descriptors(self) -> list[int]:
        return [namespace.descriptor for namespace in (self.fabric, *self.devices)]


def check_tools() -> None:
    """Refuses to start without root or iproute2."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(f"emulating a cluster needs iproute2 ({' and '.join(missing)} not found in PATH)")
    if os.geteuid() != 0:
        raise UsageError(f"emulating a cluster needs root to make network namespaces (running as user {os.geteuid()})")


@contextmanager
def emulated_network(cluster: Cluster) -> Iterator[Network]:
    """Builds the cluster's namespaces and links; leaving it lets go of them."""
    with ExitStack() as stack:
        def create() -> Namespace:
            namespace = Namespace.create()
            stack.callback(os.close, namespace.descriptor)
            return namespace

        try:
            network = Network(fabric=create(), devices=tuple(create() for _ in cluster.devices))
        except PermissionError as error:
            message = f"the kernel refused a network namespace ({error}): a container needs CAP_SYS_ADMIN"
            raise UsageError(message) from None
        _connect(cluster, network)
        yield network


def _connect(cluster: Cluster, network: Network) -> None:
    nic = TokenBucket.of_rate(cluster.nic_gbps)
    intra = TokenBucket.of_rate(cluster.intra_gbps) if cluster.intra_gbps else None
    network.fabric.configure("ip", _fabric_links(cluster, network))
    shaped = [(f"{end}{server}", nic) for server in range(cluster.servers) for end in ("up", "nic")]
    if intra:
        shaped += [(f"d{device.rank}", intra) for device in cluster.devices]
    network.fabric.configure("tc", [bucket.command(interface) for interface, bucket in shaped])
    for device, namespace in zip(cluster.devices, network.devices, strict=True):
        _set_up_device(device, namespace, nic, intra)


def _fabric_links(cluster: Cluster, network: Network) -> list[str]:
    commands = ["link add sw type bridge", "link set sw up"]
    for server in range(cluster.servers):
        commands += [
            f"link add br{server} type bridge",
            f"link set br{server} up",
            f"link add up{server} type veth peer name nic{server}",
            f"link set up{server} master br{server} up",
            f"link set nic{server} master sw up",
        ]
    for device, namespace in zip(cluster.devices, network.devices, strict=True):
        commands += [
            f"link add d{device.rank} type veth peer name {DEVICE_INTERFACE} netns {namespace.path}",
            f"link set d{device.rank} master br{device.server} up",
        ]
    return commands


def _set_up_device(device: Device, namespace: Namespace, nic: TokenBucket, intra: TokenBucket | None) -> None:
    segment_bytes = min(bucket.segment_bytes for bucket in (nic, intra) if bucket)
    with namespace.entered():
        for name, value in _TCP_SETTINGS.items():
            _write_setting(f"ipv4/{name}", value)
        _write_setting("ipv4/tcp_wmem", f"4096 16384 {nic.send_buffer_bytes}")
        # One address per interface: gloo takes the first it finds.
        _write_setting(f"ipv6/conf/{DEVICE_INTERFACE}/disable_ipv6", "1")
    namespace.configure(
        "ip",
        [
            "link set lo up",
            f"link set {DEVICE_INTERFACE} gso_max_size {segment_bytes}",
            f"addr add {device.address}/16 dev {DEVICE_INTERFACE}",
            f"link set {DEVICE_INTERFACE} up",
        ],
    )
    if intra:
        namespace.configure("tc", [intra.command(DEVICE_INTERFACE)])


def _write_setting(name: str, value: str) -> None:
    """Sets net.<name> of the namespace entered, where this kernel has it (IPv6 may be left out)."""
    path = Path("/proc/sys/net") / name
    try:
        with open(path, "r+") as setting:
            setting.write(value)
    except FileNotFoundError:
        pass


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
