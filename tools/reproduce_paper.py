"""Simulates the paper's two tables of speed-ups, and shows them beside the paper's. See docs/paper.md."""

import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("torch", "megatron.core", "rich", "matplotlib", "scipy", "yaml")

from rich.console import Console  # noqa: E402

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.cost.prediction import FlagParser  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.report.paper import ASSUMED, CLUSTERS, OTHERS, Reproduction, Row, rows_of, simulate_row  # noqa: E402
from megatron.oases.report.paper_tables import (  # noqa: E402
    cluster_table,
    draw_bars,
    summary_table,
    write_csv,
    write_markdown,
)
from megatron.oases.report.progress import runs_progress  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402

_parser: FlagParser | None = None


def parse_arguments(argv: Sequence[str]) -> Namespace:
    parser = OneLineParser(
        description="Simulate the speed-ups of the paper, 7 models x 5 systems x 2 clusters of 32 RTX 3090, from the shipped "
        "cluster files, and show them beside the paper's."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write speedups.csv, speedups.md and speedups.png there (default: nowhere)",
    )
    parser.add_argument(
        "--only-assumed", action="store_true", help="leave out the table of other assumptions, which takes most of the time"
    )
    arguments = parser.parse_args(argv)
    if arguments.output is not None:
        try:
            arguments.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {arguments.output} cannot be made: {error.strerror}") from None
    return arguments


def _bring_up() -> None:
    """Of a process that simulates rows: Megatron's parser has to be brought up in each."""
    global _parser
    _parser = FlagParser()


def _row(arguments: tuple) -> Row:
    return simulate_row(*arguments, _parser)


def reproduce(arguments: Namespace) -> list[Reproduction]:
    assumed = (ASSUMED,) if arguments.only_assumed else (ASSUMED, *OTHERS)
    tasks = [task for each in assumed for task in rows_of(each)]
    cores, start = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with (
        runs_progress(Console(stderr=True), total=len(tasks)) as progress,
        ProcessPoolExecutor(cores, mp_context=start, initializer=_bring_up) as pool,
    ):
        progress.start("simulating")
        for (cluster, model, assumptions), row in zip(tasks, pool.map(_row, tasks), strict=True):
            rows.append(row)
            name = f"{assumptions.name}, {CLUSTERS[cluster]}, {model[0]} / {model[1]}"
            progress.finish(name, f"oases {row.speedups['oases']:.2f} (paper {row.paper['oases']:.2f})")
    size = len(rows_of(ASSUMED))
    return [
        Reproduction(assumptions=each, rows=rows[number * size : (number + 1) * size])
        for number, each in enumerate(assumed)
    ]


def main() -> int:
    with exit_on_usage_error():
        arguments = parse_arguments(sys.argv[1:])
        reproductions = reproduce(arguments)
        assumed, console = reproductions[0], output_console()
        for cluster in CLUSTERS:
            console.print(cluster_table(assumed, cluster))
        console.print(summary_table(reproductions))
        if arguments.output is not None:
            try:
                write_csv(arguments.output / "speedups.csv", assumed)
                write_markdown(arguments.output / "speedups.md", assumed)
                draw_bars(arguments.output / "speedups.png", assumed)
            except OSError as error:
                raise UsageError(f"--output {arguments.output} cannot be written: {error.strerror}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
