"""Starts the ranks and waits for them: all end well, or the first to fail ends the others.

Signals and exits are both read from descriptors in one loop, so a Ctrl-C at any moment finds the same state as any
other event, and the rank that failed first is the one named even if the others follow at once.
"""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from megatron.oases.emulation.cluster import Device

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_TICK_S = 0.25
_USUAL_SHELL_SIGNAL_BASE = 128


@dataclass(frozen=True, kw_only=True)
class Rank:
    device: Device
    process: subprocess.Popen
    printers: tuple[threading.Thread, ...] = ()

    @property
    def exit_code(self) -> int:
        """As a shell would give it. Only once the process has ended."""
        code = self.process.returncode
        return _USUAL_SHELL_SIGNAL_BASE - code if code < 0 else code

    def describe_end(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"rank {self.device.rank} (server {self.device.server}, device {self.device.local_rank}) {how}"

    def send(self, signum: int) -> None:
        """To the rank's whole process group."""
        try:
            os.killpg(self.process.pid, signum)
        except ProcessLookupError:
            pass


@contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Within, the signals that ask to stop arrive as bytes on the descriptor given, and interrupt nothing."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_descriptor = signal.set_wakeup_fd(writer)
    previous = {signum: signal.signal(signum, lambda *_: None) for signum in _STOP_SIGNALS}
    try:
        yield reader
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous_descriptor)
        os.close(reader)
        os.close(writer)


def start_rank(
    device: Device,
    command: list[str],
    environment: dict[str, str],
    *,
    prefix_output: bool,
    before_exec: Callable[[], None],
) -> Rank:
    """Starts a rank in a session of its own. Its output passes through as it is, or line by line with its number.

    `before_exec` runs in the new process, so this process must not have started a thread yet.
    """
    output = subprocess.PIPE if prefix_output else None
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=before_exec,
    )
    printers = []
    if prefix_output:
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            printer = threading.Thread(target=_print_prefixed, args=(device.rank, source, target), daemon=True)
            printers.append(printer)
    return Rank(device=device, process=process, printers=tuple(printers))


def _print_prefixed(rank: int, source: BinaryIO, target: BinaryIO) -> None:
    for line in source:
        target.write(f"[rank {rank}] ".encode() + line.removesuffix(b"\n") + b"\n")
        target.flush()


def wait_for_ranks(
    ranks: list[Rank], stop_signals: int, *, on_tick: Callable[[], None], say: Callable[[str], None]
) -> int:
    """Waits for all ranks; returns the exit code of the run.

    A rank that fails, or a signal to this process, ends the others: SIGTERM, then SIGKILL after a grace period or at
    a second signal. The code is that of the rank that failed first, or 128 + the signal.
    """
    exit_code = 0
    kill_at = None
    with selectors.DefaultSelector() as selector:
        selector.register(stop_signals, selectors.EVENT_READ)
        for rank in ranks:
            selector.register(os.pidfd_open(rank.process.pid), selectors.EVENT_READ, rank)
        running = list(ranks)

        def stop(code: int, reason: str) -> None:
            nonlocal exit_code, kill_at
            exit_code = code
            kill_at = time.monotonic() + _GRACE_S
            say(f"{reason}; stopping the other ranks" if running else reason)
            for rank in running:
                rank.send(signal.SIGTERM)

        while running:
            for key, _ in selector.select(_TICK_S):
                if key.data is None:
                    signum = os.read(stop_signals, 1)[0]
                    if kill_at is None:
                        stop(_USUAL_SHELL_SIGNAL_BASE + signum, f"got {signal.Signals(signum).name}")
                    else:
                        say(f"got {signal.Signals(signum).name} again; killing the ranks")
                        kill_at = time.monotonic()
                    continue
                rank = key.data
                rank.process.wait()
                running.remove(rank)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                if rank.exit_code and kill_at is None:
                    stop(rank.exit_code, rank.describe_end())
            if kill_at is not None and time.monotonic() >= kill_at:
                for rank in running:
                    rank.send(signal.SIGKILL)
            on_tick()
    return exit_code
