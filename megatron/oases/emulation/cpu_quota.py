"""Slower devices: a CPU quota for what each rank computes, but not for its communication.

On a real server the NIC moves bytes while a slow device computes. gloo's threads stand for that NIC here, so they stay
outside the quota; otherwise a rank that has used up its share of a period would stop communicating, too. Only the
kernel's name for a thread tells them apart, and they start at any time, so somebody has to look again and again:
`release_communication_threads`.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from megatron.oases.errors import UsageError

_PERIOD_US = 10_000  # short against an iteration, long against the scheduler's slice
_MIN_QUOTA_US = 1_000  # the kernel's
_COMMUNICATION_THREADS = ("gloo_", "pt_gloo", "pt_tcpstore")


@dataclass(frozen=True, kw_only=True)
class CpuController:
    """Where this kernel keeps CPU quotas: the cpu hierarchy of cgroup v1, or v2's only one."""

    mount: Path
    version: int

    @classmethod
    def find(cls, mounts: str, unified_controllers: str | None = None) -> "CpuController":
        """`mounts` is the text of /proc/self/mounts; the v2 mount's controllers are read from it unless given."""
        for line in mounts.splitlines():
            _, mount, kind, options = line.split()[:4]
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(mount=Path(mount), version=1)
            if kind == "cgroup2":
                controllers = unified_controllers or (Path(mount) / "cgroup.controllers").read_text()
                if "cpu" in controllers.split():
                    return cls(mount=Path(mount), version=2)
        raise UsageError("--device-speed needs the cgroup cpu controller, which is not mounted here")

    @property
    def threads_file(self) -> str:
        return "tasks" if self.version == 1 else "cgroup.threads"


class CpuQuotas:
    """One cgroup per rank, under one for the run; `directory` is where, and cleanup.remove_cgroups takes it away."""

    def __init__(self, controller: CpuController, directory_name: str, ranks: int, device_speed: float):
        self._controller = controller
        self._device_speed = device_speed
        self.directory = controller.mount / directory_name
        self._of_rank = [self.directory / f"rank{rank}" for rank in range(ranks)]

    def create(self) -> None:
        try:
            self.directory.mkdir()
            if self._controller.version == 2:
                (self._controller.mount / "cgroup.subtree_control").write_text("+cpu")
                (self.directory / "cgroup.subtree_control").write_text("+cpu")
            for cgroup in self._of_rank:
                cgroup.mkdir()
                self._limit(cgroup)
        except OSError as error:
            raise UsageError(f"--device-speed: the kernel refused a CPU quota: {error}") from None

    def _limit(self, cgroup: Path) -> None:
        period_us = max(_PERIOD_US, round(_MIN_QUOTA_US / self._device_speed))
        quota_us = max(_MIN_QUOTA_US, round(self._device_speed * period_us))
        if self._controller.version == 1:
            (cgroup / "cpu.cfs_period_us").write_text(str(period_us))
            (cgroup / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            # Threads of one process can sit in different cgroups of v2 only below a threaded one.
            (cgroup / "cgroup.type").write_text("threaded")
            (cgroup / "cpu.max").write_text(f"{quota_us} {period_us}")

    def enter(self, rank: int) -> None:
        """Puts the calling process under the rank's quota, with all that it starts from now on."""
        _move(os.getpid(), self.directory / "cgroup.procs")
        _move(os.getpid(), self._of_rank[rank] / self._controller.threads_file)

    def release_communication_threads(self) -> None:
        for cgroup in self._of_rank:
            for thread in (cgroup / self._controller.threads_file).read_text().split():
                if _name_of_thread(int(thread)).startswith(_COMMUNICATION_THREADS):
                    _move(int(thread), self.directory / self._controller.threads_file)


def _name_of_thread(thread: int) -> str:
    try:
        return Path(f"/proc/{thread}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _move(process_or_thread: int, to: Path) -> None:
    try:
        to.write_text(str(process_or_thread))
    except ProcessLookupError:
        pass  # it has ended meanwhile
