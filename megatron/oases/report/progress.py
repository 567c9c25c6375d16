"""Shows how far a series of runs is: a live bar in a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_STATUS_WIDTH = 60


class RunsProgress:
    """Plain lines."""

    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total
        self._done = 0

    def start(self, name: str) -> None:
        self._console.print(f"run {self._done + 1}/{self._total}: {name} ...", markup=False, highlight=False)

    def line(self, text: str) -> None:
        """A line that the run printed."""

    def finish(self, name: str, result: str) -> None:
        self._done += 1
        self._console.print(f"run {self._done}/{self._total}: {name}: {result}", markup=False, highlight=False)


class LiveRunsProgress(RunsProgress):
    """A bar, and under it the line that the run printed last."""

    def __init__(self, console: Console, total: int, progress: Progress):
        super().__init__(console, total)
        self._progress = progress
        self._bar = progress.add_task("", total=total, status="")

    def start(self, name: str) -> None:
        self._progress.update(self._bar, description=escape(name), status="")

    def line(self, text: str) -> None:
        self._progress.update(self._bar, status=escape(text[:_STATUS_WIDTH]))

    def finish(self, name: str, result: str) -> None:
        super().finish(name, result)
        self._progress.update(self._bar, completed=self._done)


@contextmanager
def runs_progress(console: Console, total: int) -> Iterator[RunsProgress]:
    if not console.is_terminal:
        yield RunsProgress(console, total)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[status]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveRunsProgress(console, total, progress)
