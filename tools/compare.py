"""Runs the same pretraining with each system in turn and compares time and loss. See docs/comparing.md."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("rich", "torch")

from rich.console import Console  # noqa: E402

from megatron.oases.command_line import OneLineParser, split_at_double_dash  # noqa: E402
from megatron.oases.emulation.cluster import check_bandwidth  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.report.comparison import (  # noqa: E402
    WARM_UP_ITERATIONS,
    Comparison,
    median_ms,
    order_of_runs,
)
from megatron.oases.report.machine import describe_machine  # noqa: E402
from megatron.oases.report.progress import runs_progress  # noqa: E402
from megatron.oases.report.runs import REPOSITORY, Launcher, Run, RunFailed, run_name, run_once  # noqa: E402
from megatron.oases.report.systems import COMPARED, RECOMPUTE, SYSTEMS, shared_flags, system_flags, world_size  # noqa: E402
from megatron.oases.report.tables import bound_table, comparison_table, output_console  # noqa: E402


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own arguments, and the flags that all systems share."""
    parser = OneLineParser(
        description="Compare systems on one pretraining workload. Without MEGATRON FLAGS: 4 layers, hidden size 512, "
        "sequence 256, micro-batch and global batch 4, vocabulary 1024, fp32, TP 2.",
        usage="compare.py [options] [-- MEGATRON FLAGS]",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        default=list(COMPARED),
        metavar="SYSTEM",
        help="the first is the one to compare with; quoted, with flags of its own behind it: 'oases --oases-sub-batches 4' "
        f"(there are {', '.join(SYSTEMS)}; default: {' '.join(COMPARED)})",
    )
    parser.add_argument(
        "--nic-gbps",
        type=float,
        help="emulate a cluster whose servers have NICs of this many Gbit/s (default: torchrun on this machine)",
    )
    parser.add_argument(
        "--devices-per-server", type=int, metavar="N", help="ranks of an emulated server, which share its NIC (default 1)"
    )
    parser.add_argument(
        "--intra-gbps", type=float, help="Gbit/s between an emulated server's devices (default: not limited)"
    )
    parser.add_argument(
        "--device-speed", type=float, help="cores that an emulated device may use, such as 0.4 (default: not limited)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system, in alternation (default 3)")
    parser.add_argument(
        "--iterations",
        type=int,
        default=12,
        help=f"iterations a run, the first {WARM_UP_ITERATIONS} of them warm-up (default 12)",
    )
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, default="full", help="activation recomputation (default full)"
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also measure each system's computation alone and its tensor-parallel communication alone, which bound "
        "what any order of them can reach; takes three times as many runs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there (default: nowhere)")
    own, overrides = split_at_double_dash(argv)
    arguments = parser.parse_args(own)
    _check(arguments)
    flags = shared_flags(recompute=arguments.recompute, iterations=arguments.iterations, overrides=overrides)
    return arguments, flags


def _check(arguments: argparse.Namespace) -> None:
    for system in arguments.systems:
        system_flags(system)
    if len(set(arguments.systems)) != len(arguments.systems):
        raise UsageError(f"--systems {' '.join(arguments.systems)} names a system twice")
    _check_emulation(arguments)
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds} must be at least 1")
    measured = arguments.iterations - WARM_UP_ITERATIONS
    if measured < 1:
        raise UsageError(
            f"--iterations {arguments.iterations} - {WARM_UP_ITERATIONS} of warm-up = {measured} to measure; "
            f"use at least {WARM_UP_ITERATIONS + 1}"
        )
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise UsageError(f"--json {arguments.json}: there is no folder {arguments.json.absolute().parent}")


def _check_emulation(arguments: argparse.Namespace) -> None:
    for name in ("devices_per_server", "intra_gbps", "device_speed"):
        value = getattr(arguments, name)
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if arguments.nic_gbps is None:
            raise UsageError(f"{flag} {value} is of an emulated cluster: add --nic-gbps G")
        if not value > 0:
            raise UsageError(f"{flag} {value} must be above 0")
    for name in ("nic_gbps", "intra_gbps"):
        if (gbps := getattr(arguments, name)) is not None:
            check_bandwidth("--" + name.replace("_", "-"), gbps)


def compare(arguments: argparse.Namespace, flags: Sequence[str], launcher: Launcher, console: Console) -> Comparison:
    runs: list[Run] = []
    halves = (None, "compute", "communication") if arguments.bound else (None,)
    order = order_of_runs([(system, only) for system in arguments.systems for only in halves], arguments.rounds)
    with runs_progress(console, total=len(order)) as progress:
        for round_number, (system, only) in order:
            name = f"round {round_number}, {run_name(system, only)}"
            progress.start(name)
            run = run_once(
                launcher,
                system=system,
                round_number=round_number,
                flags=[*flags, *system_flags(system)],
                iterations=arguments.iterations,
                on_line=progress.line,
                only=only,
            )
            runs.append(run)
            progress.finish(name, f"{median_ms([run]):.1f} ms an iteration")
    return Comparison.of_runs(arguments.systems, runs)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with exit_on_usage_error():
        arguments, flags = parse_arguments(sys.argv[1:])
        cores = len(os.sched_getaffinity(0))
        ranks = world_size(flags)
        launcher = Launcher(
            ranks=ranks,
            nic_gbps=arguments.nic_gbps,
            threads_per_rank=max(1, cores // ranks),
            devices_per_server=arguments.devices_per_server or 1,
            intra_gbps=arguments.intra_gbps,
            device_speed=arguments.device_speed,
        )
    try:
        comparison = compare(arguments, flags, launcher, Console(stderr=True))
    except RunFailed as error:
        print(*error.last_lines, sep="\n", file=sys.stderr)
        print(f"(the last {len(error.last_lines)} lines of the failed run's output)", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    network = "torchrun on this machine" if arguments.nic_gbps is None else f"NIC {arguments.nic_gbps:g} Gbit/s"
    title = f"{ranks} ranks, {network}, recomputation {arguments.recompute}"
    console = output_console()
    console.print(comparison_table(comparison, title=title))
    if arguments.bound:
        console.print(bound_table(comparison))
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        machine = describe_machine(REPOSITORY) | {"threads_per_rank": launcher.threads_per_rank}
        arguments.json.write_text(json.dumps(comparison.to_json(command=command, machine=machine), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
