"""Ends a run's processes and removes its cgroups, also when the tool itself is killed with no chance to do so.

Namespaces need no care (see network.py), but they tell which processes belong to the run: whatever is inside one, even
if it has left its parent's session and process group.

Run as a script, this file is the watchdog: a process in a session of its own that waits until its standard input
closes, which the kernel does when the tool is gone for whatever reason. It holds the namespaces open, so that the
kernel cannot give their numbers to another run before it has looked. It imports nothing of ours: it starts in
milliseconds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_PATIENCE_S = 10.0  # for the kernel to bury what was killed
_POLL_S = 0.02


def end_run(namespace_descriptors: Iterable[int], cgroups: Path | None) -> None:
    """Kills every process inside the namespaces and removes the directory of cgroups."""
    identities = {os.fstat(descriptor).st_ino for descriptor in namespace_descriptors}
    deadline = time.monotonic() + _PATIENCE_S
    while (members := processes_inside(identities)) and time.monotonic() < deadline:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_POLL_S)
    if cgroups is not None:
        _remove_cgroups(cgroups, deadline)


def processes_inside(identities: set[int]) -> list[int]:
    """Processes other than this one whose network namespace has one of these inode numbers."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                inside = (entry / "ns" / "net").stat().st_ino in identities
            except OSError:  # ended, or a zombie
                continue
            if inside:
                members.append(int(entry.name))
    return members


def _remove_cgroups(directory: Path, deadline: float) -> None:
    """A cgroup cannot go while a process is in it, nor for a moment after."""
    while directory.exists():
        try:
            for child in directory.iterdir():
                if child.is_dir():
                    child.rmdir()
            directory.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


class Watchdog:
    """The process that runs `end_run`: when told to, or once this process is gone."""

    def __init__(self, namespace_descriptors: Sequence[int], cgroups: Path | None):
        self._namespace_descriptors = namespace_descriptors
        self._cgroups = cgroups
        arguments = [str(cgroups or ""), *map(str, namespace_descriptors)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=list(namespace_descriptors),
            start_new_session=True,
        )

    def close(self) -> None:
        self._process.stdin.close()
        if self._process.wait() != 0:  # somebody has killed it
            end_run(self._namespace_descriptors, self._cgroups)


def _watch(arguments: Sequence[str]) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the tool gets it too, and then its pipe closes
    cgroups, *descriptors = arguments
    sys.stdin.buffer.read()
    end_run([int(descriptor) for descriptor in descriptors], Path(cgroups) if cgroups else None)


if __name__ == "__main__":
    _watch(sys.argv[1:])
