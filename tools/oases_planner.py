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

from rich.console import Console  # noqa: E402

from megatron.oases.command_line import OneLineParser, split_at_double_dash  # noqa: E402
from megatron.oases.cost.model import CostModel  # noqa: E402
from megatron.oases.cost.prediction import FlagParser  # noqa: E402
from megatron.oases.cost.sources import cluster_source, profile_source  # noqa: E402
from megatron.oases.cost.system import System  # noqa: E402
from megatron.oases.cost.workload import Workload  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.plan import Plan, Predicted, Solver, read_plan, write_plan  # noqa: E402
from megatron.oases.plan.plan import VERSION  # noqa: E402
from megatron.oases.planner.program import Infeasible  # noqa: E402
from megatron.oases.planner.report import changes_table, differences_table, explanation, plans_table  # noqa: E402
from megatron.oases.planner.search import Candidate, search, uniform_plans  # noqa: E402
from megatron.oases.report.systems import SYSTEMS, checked_world_size, planned_flags, system_flags  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402
from megatron.oases.sizes import GIB  # noqa: E402

_RECOMPUTATION = {"choose": (False, True), "full": (True,), "none": (False,)}


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
    parser.add_argument("--system", choices=SYSTEMS, default="oases", help="who runs the plan (default oases)")
    parser.add_argument(
        "--sub-batches", type=int, nargs="+", metavar="S", help="numbers of sub-batches to try (default 1 2)"
    )
    parser.add_argument(
        "--recompute", choices=_RECOMPUTATION, default="choose", help="blocks that are recomputed (default choose)"
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
    # Megatron is imported once its environment is there.
    source = cluster_source(arguments.cluster) if arguments.cluster else profile_source(arguments.profile)
    parser = FlagParser()
    from megatron.oases.cost.flags import system_of, workload_of

    ranks = checked_world_size(arguments.world_size, flags)
    args, config = parser.parse(
        [*flags, *system_flags(arguments.system)], available=source.available, world_size=ranks
    )
    workload = workload_of(args, config, on_cpu=source.on_cpu)
    if workload.pipeline > 1:
        raise UsageError(f"--pipeline-model-parallel-size {workload.pipeline}: plans are made for 1")
    system = system_of(config, host_sees_completion=source.on_cpu)
    cost = source.cost(workload, args, system)
    memory_bytes = source.memory_bytes if arguments.memory_gib is None else round(arguments.memory_gib * GIB)
    try:
        found = search(
            cost,
            workload,
            system,
            degrees=source.degrees,
            sub_batches=_sub_batches(arguments, workload, system),
            recomputation=_RECOMPUTATION[arguments.recompute],
            memory_bytes=memory_bytes,
        )
    except Infeasible as error:
        raise UsageError(
            f"no plan fits: the smallest needs {error.least_bytes / GIB:.2f} GiB on a device, which has "
            f"{memory_bytes / GIB:.2f}; {(error.least_bytes - memory_bytes) / GIB:.2f} GiB are missing: use a smaller "
            "--micro-batch-size, a larger --tensor-model-parallel-size, --use-distributed-optimizer or --recompute choose"
        ) from None
    _print(found, cost, system, arguments, source.name)
    for line in sorted(source.announcements(cost)):
        print(f"note: {line}", file=sys.stderr)
    if arguments.output is not None:
        write_plan(arguments.output, _plan_of(found[0], source.name, system))
        print(f"{arguments.output}: {shlex.join(sys.argv)}")


def _sub_batches(arguments: Namespace, workload: Workload, system: System) -> list[int]:
    if system.is_vanilla:
        return [1]
    for count in arguments.sub_batches or ():
        if not 1 <= count <= workload.micro_batch:
            raise UsageError(f"--sub-batches {count}: a micro-batch has {workload.micro_batch} samples")
    return sorted(set(arguments.sub_batches or [1, min(2, workload.micro_batch)]))


def _print(
    found: Sequence[Candidate], cost: CostModel, system: System, arguments: Namespace, costs: str
) -> None:
    console: Console = output_console()
    best = found[0]
    plans = [*found, *uniform_plans(best, cost, system)]
    console.print(plans_table(plans, title=f"Plans for {costs}"))
    if arguments.explain:
        for line in explanation(plans):
            console.print(line)
        console.print(changes_table(best))


def _plan_of(best: Candidate, costs: str, system: System) -> Plan:
    workload, evaluation = best.workload, best.evaluation
    return Plan(
        version=VERSION,
        model=workload.model,
        costs=costs,
        tensor=workload.tensor,
        data=workload.data,
        micro_batch=workload.micro_batch,
        micro_batches=workload.micro_batches,
        schedule=system.schedule,
        sub_batches=workload.sub_batches,
        layers=best.layers,
        predicted=Predicted(
            by="program",
            iteration_ms=evaluation.iteration_ms,
            exposed_ms=evaluation.exposed_ms,
            memory_bytes=evaluation.memory_bytes,
        ),
        solver=Solver(status=best.solution.status, gap=best.solution.gap, seconds=best.solution.seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
