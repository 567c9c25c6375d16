#!/usr/bin/env python3
"""Measures what the planner chooses against what it does not, on the emulated cluster. See docs/planner.md."""

import json
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("torch", "megatron.core", "rich", "scipy", "yaml")

from rich.console import Console  # noqa: E402

from megatron.oases.command_line import OneLineParser, check_output  # noqa: E402
from megatron.oases.cost.prediction import FlagParser  # noqa: E402
from megatron.oases.cost.sources import profile_source  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.report.comparison import WARM_UP_ITERATIONS, median_ms, order_of_runs  # noqa: E402
from megatron.oases.report.machine import describe_machine  # noqa: E402
from megatron.oases.report.plan_validation import (  # noqa: E402
    PLAN_WORKLOADS,
    PlanValidation,
    PlanWorkload,
    contenders,
    plan_validation_table,
)
from megatron.oases.report.progress import runs_progress  # noqa: E402
from megatron.oases.report.runs import REPOSITORY, RunFailed, run_once  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402
from megatron.oases.report.validation import take_profile  # noqa: E402


def parse_arguments(argv: Sequence[str]) -> Namespace:
    named = "; ".join(f"{i} {each.name}" for i, each in enumerate(PLAN_WORKLOADS, 1))
    parser = OneLineParser(
        description="On the emulated cluster, two servers of two devices: take a profile, plan, and run the planner's "
        "choice, the best uniform plan of every degree and three plans drawn at random, in alternation. Needs root."
    )
    parser.add_argument(
        "--workloads", type=int, nargs="+", metavar="N", help=f"by number: {named} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each plan, in alternation (default 2)")
    parser.add_argument(
        "--iterations", type=int, default=8, help=f"of a run, {WARM_UP_ITERATIONS} of them warm-up (default 8)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("profiles"),
        help="where profiles are kept, and used again, and plans are written (default: profiles, made if need be)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args(argv)
    for number in arguments.workloads or ():
        if not 1 <= number <= len(PLAN_WORKLOADS):
            raise UsageError(f"--workloads {number}: there are 1 to {len(PLAN_WORKLOADS)}")
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.iterations <= WARM_UP_ITERATIONS:
        raise UsageError(f"--iterations {arguments.iterations} must be more than {WARM_UP_ITERATIONS}, which warm up")
    if arguments.json is not None:
        check_output("--json", arguments.json)
    return arguments


def measure(workload: PlanWorkload, arguments: Namespace, parser: FlagParser) -> PlanValidation:
    launcher, console = workload.launcher, Console(stderr=True)
    folder = arguments.folder / f"plans-{workload.name.replace(' ', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    profile = arguments.folder / workload.profile_name
    if not profile.exists():
        with runs_progress(console, total=1) as progress:
            progress.start(f"profile of {workload.name}")
            degrees = [degree for degree in range(1, launcher.ranks + 1) if launcher.ranks % degree == 0]
            take_profile(
                workload.name, workload.flags(1), launcher, profile, degrees=degrees, on_line=progress.line
            )
            progress.finish(f"profile of {workload.name}", str(profile))
    competing = contenders(workload, profile_source(profile), parser, folder)
    order, runs = order_of_runs(competing, arguments.rounds), []
    with runs_progress(console, total=len(order)) as progress:
        for round_number, contender in order:
            what = f"{workload.name}, round {round_number}, {contender.name}"
            progress.start(what)
            run = run_once(
                launcher,
                system=contender.name,
                round_number=round_number,
                flags=[*workload.flags(arguments.iterations), "--oases-plan", str(contender.path)],
                iterations=arguments.iterations,
                on_line=progress.line,
            )
            runs.append(run)
            progress.finish(what, f"{median_ms([run]):.1f} ms an iteration")
    return PlanValidation(workload=workload, contenders=tuple(competing), runs=tuple(runs))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with exit_on_usage_error():
        arguments = parse_arguments(sys.argv[1:])
        about = {"command": shlex.join(["python", *sys.argv]), "machine": describe_machine(REPOSITORY)}
        parser, validations = FlagParser(), []
        try:
            for number in arguments.workloads or range(1, len(PLAN_WORKLOADS) + 1):
                validations.append(measure(PLAN_WORKLOADS[number - 1], arguments, parser))
                output_console().print(plan_validation_table(validations[-1]))
                if arguments.json is not None:  # after every workload: one that fails later loses nothing
                    result = {"workloads": [each.to_json() for each in validations]} | about
                    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        except RunFailed as error:
            print(*error.last_lines, sep="\n", file=sys.stderr)
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
