#!/usr/bin/env python3
"""Chooses the tensor-parallel degree of every block, and which are recomputed. Needs no device."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.oases.environment import require  # noqa: E402

require("rich", "torch", "scipy")

from megatron.oases.command_line import OneLineParser, split_at_double_dash  # noqa: E402
from megatron.oases.cost.prediction import FlagParser  # noqa: E402
from megatron.oases.cost.sources import cluster_source, profile_source  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.plan import Run, check_plan, read_plan, write_plan  # noqa: E402
from megatron.oases.planner.planning import RECOMPUTATION, SCHEDULES, Planning  # noqa: E402
from megatron.oases.planner.report import (  # noqa: E402
    changes_table,
    degrees_table,
    differences_table,
    explanation,
    layouts_table,
    plans_table,
)
from megatron.oases.planner.search import Candidate  # noqa: E402
from megatron.oases.report.systems import checked_world_size, planned_flags  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402
from megatron.oases.sizes import GIB  # noqa: E402


def parse_arguments(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The tool's own arguments, and Megatron's flags."""
    parser = OneLineParser(
        description="Choose the tensor-parallel degree of every block, and which blocks are recomputed, so that an "
        "iteration takes least time within a device's memory. MEGATRON FLAGS are those of the training command; "
        "--tensor-model-parallel-size is the largest degree.",
        usage="oases_planner.py (--cluster NAME|FILE | --profile FILE) [options] -- MEGATRON FLAGS\n"
        "       oases_planner.py --diff PLAN PLAN",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--cluster", metavar="NAME|FILE", help="a shipped cluster, or a cluster file (YAML)")
    source.add_argument("--profile", type=Path, metavar="FILE", help="what tools/oases_profiler.py measured")
    source.add_argument("--diff", type=Path, nargs=2, metavar="PLAN", help="say in what two plan files differ")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan there (JSON)")
    parser.add_argument("--world-size", type=int, metavar="N", help="devices (default: TP, that is DP 1)")
    parser.add_argument("--memory-gib", type=float, metavar="G", help="of a device (default: the cluster file's)")
    parser.add_argument(
        "--search-layout",
        action="store_true",
        help="try all TP x PP x DP of --world-size and all micro-batches of --global-batch-size; what MEGATRON FLAGS "
        "say of these sizes stays",
    )
    parser.add_argument(
        "--system",
        choices=SCHEDULES,
        default="oases",
        help="oases: communication hides behind computation. alpa: a planner that takes it to hide nowhere, for plans "
        "that run in Megatron's own order (default oases)",
    )
    parser.add_argument(
        "--sub-batches", type=int, nargs="+", metavar="S", help="numbers of sub-batches to try (default 1 2)"
    )
    parser.add_argument(
        "--recompute", choices=RECOMPUTATION, default="choose", help="blocks that are recomputed (default choose)"
    )
    parser.add_argument("--explain", action="store_true", help="say what binds, and what would change the plan")
    own, flags = split_at_double_dash(argv)
    arguments = parser.parse_args(own)
    if arguments.diff is not None:
        return arguments, []
    if not flags:
        raise UsageError("MEGATRON FLAGS are missing: write those of the training command after --")
    if arguments.memory_gib is not None and not 0 < arguments.memory_gib < float("inf"):
        raise UsageError(f"--memory-gib {arguments.memory_gib:g} must be a finite number above 0")
    if arguments.output is not None and not arguments.output.absolute().parent.is_dir():
        raise UsageError(f"--output {arguments.output}: there is no folder {arguments.output.absolute().parent}")
    if arguments.search_layout and (arguments.world_size is None or arguments.world_size < 1):
        raise UsageError("--search-layout needs --world-size N, the number of devices")
    return arguments, planned_flags(flags)


def main() -> int:
    with exit_on_usage_error():
        arguments, flags = parse_arguments(sys.argv[1:])
        if arguments.diff is not None:
            names = [str(path) for path in arguments.diff]
            output_console().print(differences_table(names, [read_plan(path) for path in arguments.diff]))
        else:
            plan(arguments, flags)
    return 0


def plan(arguments: Namespace, flags: Sequence[str]) -> None:
    source = cluster_source(arguments.cluster) if arguments.cluster else profile_source(arguments.profile)
    gib, console = arguments.memory_gib, output_console()
    memory_bytes = source.memory_bytes if gib is None else round(gib * GIB)
    planning = Planning(
        flags,
        source,
        FlagParser(),  # brings Megatron up once its environment is there
        system=arguments.system,
        recompute=arguments.recompute,
        sub_batches=arguments.sub_batches,
        memory_bytes=memory_bytes,
    )
    if arguments.search_layout:
        found = planning.best_layout(
            world_size=arguments.world_size,
            on_layouts=lambda planned, refused: console.print(layouts_table(planned, refused)),
        )
    else:
        found = planning.best(world_size=checked_world_size(arguments.world_size, flags))
    console.print(plans_table(found, title=f"Plans for {source.name}"))
    if arguments.explain:
        _explain(found)
    for line in sorted(planning.announcements):
        print(f"note: {line}", file=sys.stderr)
    plan = planning.plan_of(found[0])
    run = Run.of(found[0].workload, memory_bytes=memory_bytes)
    check_plan(plan, run, where=str(arguments.output or "the plan"))
    if arguments.output is not None:
        write_plan(arguments.output, plan)
        print(f"{arguments.output}: {shlex.join(sys.argv)}")


def _explain(found: Sequence[Candidate]) -> None:
    console = output_console()
    for line in explanation(found):
        console.print(line)
    console.print(degrees_table(found[0]))
    console.print(changes_table(found[0]))


if __name__ == "__main__":
    sys.exit(main())
