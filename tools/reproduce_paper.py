"""The paper's two tables of speed-ups: simulated, beside the paper's, or measured on the emulated cluster. See docs/paper.md."""

import multiprocessing
import os
import signal
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
from megatron.oases.emulation.cluster import check_bandwidth  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.report.comparison import WARM_UP_ITERATIONS  # noqa: E402
from megatron.oases.report.measured import (  # noqa: E402
    MeasuredModel,
    Settings,
    contenders,
    measure,
    read_measured,
    runs_of,
    write_measured,
)
from megatron.oases.report.paper import (  # noqa: E402
    ASSUMED,
    CLUSTERS,
    MODELS,
    OTHERS,
    Reproduction,
    Row,
    rows_of,
    simulate_row,
)
from megatron.oases.report.paper_tables import (  # noqa: E402
    ablation_table,
    cluster_table,
    draw_bars,
    measured_table,
    model_name,
    summary_table,
    write_csv,
    write_markdown,
)
from megatron.oases.report.progress import runs_progress  # noqa: E402
from megatron.oases.report.runs import RunFailed  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402

_parser: FlagParser | None = None


def parse_arguments(argv: Sequence[str]) -> Namespace:
    names = [model_name(model) for model in MODELS]
    parser = OneLineParser(
        description="Simulate the speed-ups of the paper, 7 models x 5 systems x 2 clusters of 32 RTX 3090, from the shipped "
        "cluster files, and show them beside the paper's. With --measure run the systems instead, on the models scaled down."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write speedups.csv, speedups.md and speedups.png there (default: nowhere); with --measure plans and "
        "measured.json, and leave out models that stand there already (default: measured)",
    )
    parser.add_argument(
        "--only-assumed", action="store_true", help="leave out the table of other assumptions, which takes most of the time"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run six systems and what oases is made of on the emulated cluster, two servers of one device; less than 40 "
        "minutes on two cores, as root",
    )
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, metavar="MODEL", help=f"to measure: {', '.join(names)} (default: all)"
    )
    parser.add_argument("--nic-gbps", type=float, default=0.5, help="of the emulated servers, Gbit/s (default 0.5)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system, in alternation (default 2)")
    parser.add_argument(
        "--iterations", type=int, default=6, help=f"of a run, {WARM_UP_ITERATIONS} of them warm-up (default 6)"
    )
    arguments = parser.parse_args(argv)
    check_bandwidth("--nic-gbps", arguments.nic_gbps)
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.iterations <= WARM_UP_ITERATIONS:
        raise UsageError(f"--iterations {arguments.iterations} must be more than {WARM_UP_ITERATIONS}, which warm up")
    if arguments.measure and arguments.output is None:
        arguments.output = Path("measured")
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
            name = f"{assumptions.name}, {CLUSTERS[cluster]}, {model_name(model)}"
            progress.finish(name, f"oases {row.speedups['oases']:.2f} (paper {row.paper['oases']:.2f})")
    size = len(rows_of(ASSUMED))
    return [
        Reproduction(assumptions=each, rows=rows[number * size : (number + 1) * size])
        for number, each in enumerate(assumed)
    ]


def measure_all(arguments: Namespace) -> list[MeasuredModel]:
    """After every model the file is written: one that fails later loses nothing."""
    settings = Settings(nic_gbps=arguments.nic_gbps, rounds=arguments.rounds, iterations=arguments.iterations)
    path, parser = arguments.output / "measured.json", FlagParser()
    measured = {model_name(each.model): each for each in read_measured(path) if each.settings == settings}
    for model in MODELS:
        name = model_name(model)
        if name not in arguments.models or name in measured:
            continue
        competing = contenders(model, settings, parser, arguments.output)
        with runs_progress(Console(stderr=True), total=runs_of(competing, settings)) as progress:
            measured[name] = measure(
                model,
                settings,
                competing,
                on_start=progress.start,
                on_line=progress.line,
                on_end=progress.finish,
            )
        write_measured(path, list(measured.values()))
    return [measured[name] for name in map(model_name, MODELS) if name in measured]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with exit_on_usage_error():
        arguments = parse_arguments(sys.argv[1:])
        if arguments.measure:
            try:
                models = measure_all(arguments)
            except RunFailed as error:
                print(*error.last_lines, sep="\n", file=sys.stderr)
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
            output_console().print(measured_table(models), ablation_table(models))
            return 0
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
