"""Starts programs as a user would: under torchrun, in processes of their own, with a time limit."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Finished:
    """A program that has ended: its exit code, and what it and its ranks printed."""

    code: int
    output: str

    @property
    def tail(self) -> str:
        """The end of the output, for the message of a failed assertion."""
        return self.output[-4000:]

    def lines(self, beginning: str) -> list[str]:
        """The lines that start so."""
        return [line for line in self.output.splitlines() if line.startswith(beginning)]


class Running:
    """A program that runs in a session of its own, so that it can be ended with all that it started."""

    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def ranks(self, program: str) -> list[psutil.Process]:
        """The ranks of a torchrun job, in the order in which they were started."""
        children = psutil.Process(self.process.pid).children()
        ranks = [child for child in children if any(word.endswith(program) for word in child.cmdline())]
        return sorted(ranks, key=lambda child: child.pid)

    def wait(self, timeout_s: float) -> Finished:
        """Waits for the end; a program that takes longer is killed, and the test fails with what it printed."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s; it printed:\n{self.output[-4000:]}") from None
        return Finished(code, self.output)

    def kill(self) -> None:
        if self.process.poll() is None:
            started = psutil.Process(self.process.pid).children(recursive=True)
            os.killpg(self.process.pid, signal.SIGKILL)
            for child in started:
                if child.is_running():
                    child.kill()
            self.process.wait()


@contextmanager
def running(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Starts a command in the repository's root; it is gone when the block is left.

    Args:
        command: the program and its arguments.
        environment: variables to add to this process's.
    """
    # One thread a rank: the ranks are to share two cores.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        program = Running(process, output)
        try:
            yield program
        finally:
            program.kill()


def python(program: Sequence[str], *, timeout_s: float = 180, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a Python program in one process, without a launcher.

    Args:
        program: its path, from the repository's root, and its arguments.
        timeout_s: when it counts as hanging.
        environment: variables to add to this process's.
    """
    with running([sys.executable, *program], environment=environment) as process:
        return process.wait(timeout_s)


def torchrun_command(program: Sequence[str], ranks: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program
    ]  # fmt: skip


def torchrun(
    program: Sequence[str],
    *,
    ranks: int = 2,
    timeout_s: float = 240,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a Python program under torchrun on this machine; torchrun finds a free port by itself.

    Args:
        program: its path, from the repository's root, and its arguments.
        ranks: number of processes.
        timeout_s: when it counts as hanging.
        environment: variables to add to this process's.
    """
    with running(torchrun_command(program, ranks), environment=environment) as process:
        return process.wait(timeout_s)
