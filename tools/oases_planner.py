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
from megatron.oases.cost.prediction import FlagParser  # noqa: E402
from megatron.oases.cost.sources import CostSource, cluster_source, profile_source  # noqa: E402
from megatron.oases.cost.system import System  # noqa: E402
from megatron.oases.cost.workload import Workload  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.plan import (  # noqa: E402
    Devices,
    Plan,
    Predicted,
    Run,
    Solver,
    check_plan,
    read_plan,
    write_plan,
)
from megatron.oases.plan.plan import VERSION  # noqa: E402
from megatron.oases.planner.layouts import layouts  # noqa: E402
from megatron.oases.planner.program import Infeasible  # noqa: E402
from megatron.oases.planner.report import (  # noqa: E402
    changes_table,
    degrees_table,
    differences_table,
    explanation,
    layouts_table,
    plans_table,
)
from megatron.oases.planner.search import Candidate, Search  # noqa: E402
from megatron.oases.report.systems import checked_world_size, planned_flags  # noqa: E402
from megatron.oases.report.tables import output_console  # noqa: E402
from megatron.oases.sizes import GIB  # noqa: E402

# Who runs the plan, and its --oases-schedule.
_SCHEDULES = {"oases": "oases", "alpa": "vanilla"}
_CHOSEN_HERE = {
    "--oases-plan": "",
    "--oases-degrees": "",
    "--oases-schedule": ", or choose with --system",
    "--oases-sub-batches": ", or say which to try with --sub-batches",
}
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
    parser.add_argument(
        "--search-layout",
        action="store_true",
        help="try all TP x PP x DP of --world-size and all micro-batches of --global-batch-size; what MEGATRON FLAGS "
        "say of these sizes stays",
    )
    parser.add_argument(
        "--system",
        choices=_SCHEDULES,
        default="oases",
        help="oases: communication hides behind computation. alpa: a planner that takes it to hide nowhere, for plans "
        "that run in Megatron's own order (default oases)",
    )
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
    planning = Planning(arguments, flags, source)
    if arguments.search_layout:
        found = planning.best_layout(console=output_console())
    else:
        found = planning.of(flags, world_size=checked_world_size(arguments.world_size, flags), best=3)
    planning.report(found)


class Planning:
    """Plans for one training command.

    Args:
        arguments: the tool's own.
        flags: Megatron's.
        source: of the costs.
    """

    def __init__(self, arguments: Namespace, flags: Sequence[str], source: CostSource):
        self._arguments = arguments
        self._flags = flags
        self._source = source
        _check_flags(flags)
        self._parser = FlagParser()  # imports Megatron once its environment is there
        gib = arguments.memory_gib
        self._memory_bytes = source.memory_bytes if gib is None else round(gib * GIB)
        self._announcements: set[str] = set()

    def of(self, flags: Sequence[str], *, world_size: int, best: int) -> list[Candidate]:
        """The best plans for one layout. `best`: how many of each number of sub-batches are simulated."""
        from megatron.oases.cost.flags import system_of, workload_of

        arguments, source = self._arguments, self._source
        # How many sub-batches there are is chosen here, so that a training command need not know.
        own = ("--oases-schedule", "oases", "--oases-sub-batches", "1") if arguments.system == "oases" else ()
        args, config = self._parser.parse([*flags, *own], available=source.available, world_size=world_size)
        workload = workload_of(args, config, on_cpu=source.on_cpu)
        if workload.recompute != "none":
            note = "--recompute-granularity: the plan says which blocks are recomputed; train without it"
            self._announcements.add(note)
        system = system_of(config, host_sees_completion=source.on_cpu)
        cost = source.cost(workload, args, system)
        search = Search(
            cost,
            workload,
            system,
            degrees=source.degrees,
            recomputation=_RECOMPUTATION[arguments.recompute],
            memory_bytes=self._memory_bytes,
            best=best,
        )
        try:
            found = search.run(_sub_batches(arguments, workload, system))
        except Infeasible as error:
            missing_bytes = error.least_bytes - self._memory_bytes
            raise UsageError(
                f"no plan fits: the smallest needs {error.least_bytes / GIB:.2f} GiB on a device, which has "
                f"{self._memory_bytes / GIB:.2f}; {missing_bytes / GIB:.2f} GiB are missing: use a smaller "
                "--micro-batch-size, a larger --tensor-model-parallel-size, --use-distributed-optimizer or "
                "--recompute choose"
            ) from None
        self._announcements |= source.announcements(cost)
        return found

    def best_layout(self, *, console: Console) -> list[Candidate]:
        """The best plans of the layout whose first is the best of all."""
        world_size = self._arguments.world_size
        found, refused = {}, {}
        for layout in layouts(self._flags, world_size=world_size):
            try:
                found[layout] = self.of([*self._flags, *layout.flags], world_size=world_size, best=1)
            except UsageError as error:
                refused[layout] = str(error).partition(": use a smaller")[0]
        ordered = sorted(found, key=lambda layout: found[layout][0].simulated.iteration_ms)
        console.print(layouts_table([(layout, found[layout][0]) for layout in ordered], refused))
        if not found:
            raise UsageError(f"--search-layout: none of {len(refused)} layouts has a plan; the table says why")
        return found[ordered[0]]

    def report(self, found: Sequence[Candidate]) -> None:
        """Prints them, and writes the first."""
        console, arguments, best = output_console(), self._arguments, found[0]
        console.print(plans_table(found, title=f"Plans for {self._source.name}"))
        if arguments.explain:
            for line in explanation(found):
                console.print(line)
            console.print(degrees_table(best))
            console.print(changes_table(best))
        for line in sorted(self._announcements):
            print(f"note: {line}", file=sys.stderr)
        plan = self._plan_of(best)
        run = Run.of(best.workload, memory_bytes=self._memory_bytes)
        check_plan(plan, run, where=str(arguments.output or "the plan"))
        if arguments.output is not None:
            write_plan(arguments.output, plan)
            print(f"{arguments.output}: {shlex.join(sys.argv)}")

    def _plan_of(self, best: Candidate) -> Plan:
        workload, simulated, solution = best.workload, best.simulated, best.solution
        source = self._source
        return Plan(
            version=VERSION,
            model=workload.model,
            devices=Devices(name=source.device, backend=source.backend, memory_bytes=self._memory_bytes),
            costs=source.name,
            tensor=workload.tensor,
            pipeline=workload.pipeline,
            data=workload.data,
            micro_batch=workload.micro_batch,
            micro_batches=workload.micro_batches,
            schedule=_SCHEDULES[self._arguments.system],
            sub_batches=workload.sub_batches,
            layers=best.layers,
            predicted=Predicted(
                by="simulator",
                iteration_ms=simulated.iteration_ms,
                exposed_ms=simulated.exposed_ms,
                memory_bytes=simulated.peak_bytes,
            ),
            solver=None
            if solution is None  # a uniform plan, which was simulated only
            else Solver(status=solution.status, gap=solution.gap, seconds=solution.seconds),
        )


def _check_flags(flags: Sequence[str]) -> None:
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _CHOSEN_HERE:
            raise UsageError(f"{name}: that is what is planned; leave it out{_CHOSEN_HERE[name]}")


def _sub_batches(arguments: Namespace, workload: Workload, system: System) -> list[int]:
    if system.is_vanilla:
        return [1]
    for count in arguments.sub_batches or ():
        if not 1 <= count <= workload.micro_batch:
            raise UsageError(f"--sub-batches {count}: a micro-batch has {workload.micro_batch} samples")
    return sorted(set(arguments.sub_batches or [1, min(2, workload.micro_batch)]))


if __name__ == "__main__":
    sys.exit(main())
