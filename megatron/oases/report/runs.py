"""One run of pretrain_gpt.py by a launcher, and what it reports."""

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.oases.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[3]
_LAST_LINES = 40
_USER_ERROR = "error: "  # how errors.exit_on_usage_error begins its line


Half = Literal["compute", "communication"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run measured, in order of iterations."""

    system: str
    round_number: int  # from 1
    iterations_ms: tuple[float, ...]
    losses: tuple[float, ...]  # empty where only one half ran
    tokens_per_iteration: int
    only: Half | None = None


def run_name(system: str, only: Half | None) -> str:
    return system if only is None else f"{system}, {only} only"


class RunFailed(Exception):
    """A run that gave no result; carries the end of what it printed, and its exit code."""

    def __init__(self, message: str, *, last_lines: Sequence[str], exit_code: int):
        super().__init__(message)
        self.last_lines = list(last_lines)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts one process per rank: on an emulated cluster, or with torchrun.

    Args:
        ranks: number of them.
        nic_gbps: of the emulated servers, Gbit/s; None: torchrun on this machine.
        threads_per_rank: that compute.
        devices_per_server: ranks of an emulated server.
        intra_gbps: Gbit/s between devices of an emulated server; None: not limited.
        device_speed: cores that an emulated device's computing may use; None: not limited.
    """

    ranks: int
    nic_gbps: float | None
    threads_per_rank: int
    devices_per_server: int = 1
    intra_gbps: float | None = None
    device_speed: float | None = None

    def __post_init__(self) -> None:
        if self.ranks % self.devices_per_server:
            raise UsageError(f"--devices-per-server {self.devices_per_server} does not divide {self.ranks} ranks")

    def command(self, script_and_flags: Sequence[str]) -> list[str]:
        if self.nic_gbps is None:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            return [sys.executable, *torchrun, *script_and_flags]
        flags = {
            "--servers": self.ranks // self.devices_per_server,
            "--devices-per-server": self.devices_per_server,
            "--nic-gbps": self.nic_gbps,
            "--intra-gbps": self.intra_gbps,
            "--device-speed": self.device_speed,
        }
        emulate = [str(REPOSITORY / "tools" / "emulate_cluster.py")]
        emulate += [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        return [sys.executable, *emulate, "--", sys.executable, *script_and_flags]

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ, OMP_NUM_THREADS=str(self.threads_per_rank), PYTHONUNBUFFERED="1")


def run_once(
    launcher: Launcher,
    *,
    system: str,
    round_number: int,
    flags: Sequence[str],
    iterations: int,
    on_line: Callable[[str], None],
    only: Half | None = None,
) -> Run:
    """Runs to the end, giving each line of output to `on_line`. Raises `RunFailed`.

    `only`: the half of each training step that is to run.
    """
    with tempfile.TemporaryDirectory(prefix="oases-compare-") as folder:
        report = Path(folder) / "report.json"
        script = [str(REPOSITORY / "pretrain_gpt.py"), *flags, "--oases-report", str(report)]
        if only is not None:
            script += ["--oases-only", only]
        last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        user_errors: list[str] = []

        def keep(line: str) -> None:
            last_lines.append(line)
            if line.startswith(_USER_ERROR):
                user_errors.append(line.removeprefix(_USER_ERROR))
            on_line(line)

        exit_code = _execute(launcher.command(script), launcher.environment, keep)
        where = f"round {round_number} of {run_name(system, only)}"
        if exit_code:
            code = exit_code if exit_code > 0 else 128 - exit_code
            # torchrun prints more than the last lines about a rank's failure, after what the rank itself has said.
            message = ": ".join([f"{where} ended with exit code {code}", *user_errors[:1]])
            raise RunFailed(message, last_lines=last_lines, exit_code=code)
        try:
            return parse_report(
                report.read_text(), system=system, round_number=round_number, iterations=iterations, only=only
            )
        except (OSError, ValueError, KeyError) as error:
            raise RunFailed(f"{where} gave no usable report: {error}", last_lines=last_lines, exit_code=1) from error


def _execute(command: Sequence[str], environment: dict[str, str], on_line: Callable[[str], None]) -> int:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        for line in process.stdout:
            on_line(line.rstrip())
        return process.wait()
    finally:
        # Ctrl-C or a signal: the launcher ends its ranks and cleans up, so it gets the time for it.
        if process.poll() is None:
            process.terminate()
            process.wait()


def parse_report(
    text: str, *, system: str, round_number: int, iterations: int, only: Half | None = None
) -> Run:
    """Reads what `--oases-report` wrote. Raises ValueError or KeyError if it is not a whole run.

    Losses of a run of one half mean nothing, and are left out.
    """
    report = json.loads(text)
    measured = sorted(report["iterations"], key=lambda entry: entry["iteration"])
    if len(measured) != iterations:
        raise ValueError(f"{len(measured)} iterations instead of {iterations}")
    with_loss = measured if only is None else []
    for entry in with_loss:
        if entry["loss"] is None:
            raise ValueError(f"the loss of iteration {entry['iteration']} is not finite")
    return Run(
        system=system,
        round_number=round_number,
        iterations_ms=tuple(entry["time_ms"] for entry in measured),
        losses=tuple(entry["loss"] for entry in with_loss),
        tokens_per_iteration=report["tokens_per_iteration"],
        only=only,
    )
