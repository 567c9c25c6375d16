"""From a training command to plans for it."""

from collections.abc import Callable, Sequence

from megatron.oases.cost.prediction import FlagParser
from megatron.oases.cost.sources import CostSource
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.errors import UsageError
from megatron.oases.plan import Devices, Plan, Predicted, Solver
from megatron.oases.plan.plan import VERSION
from megatron.oases.planner.layouts import Layout, layouts
from megatron.oases.planner.program import Infeasible
from megatron.oases.planner.search import Candidate, Search
from megatron.oases.sizes import GIB

# Who runs the plan, and its --oases-schedule.
SCHEDULES = {"oases": "oases", "alpa": "vanilla"}
RECOMPUTATION = {"choose": (False, True), "full": (True,), "none": (False,)}
_CHOSEN_HERE = {
    "--oases-plan": "",
    "--oases-degrees": "",
    "--oases-schedule": ", or choose with --system",
    "--oases-sub-batches": ", or say which to try with --sub-batches",
}


class Planning:
    """Plans for one training command.

    Args:
        flags: Megatron's.
        source: of the costs.
        parser: of the flags.
        system: a name in `SCHEDULES`.
        recompute: a name in `RECOMPUTATION`.
        sub_batches: numbers to try; None: 1 and 2.
        memory_bytes: of a device; None: no limit.

    Raises:
        UsageError: the flags say what is to be planned.
    """

    def __init__(
        self,
        flags: Sequence[str],
        source: CostSource,
        parser: FlagParser,
        *,
        system: str = "oases",
        recompute: str = "choose",
        sub_batches: Sequence[int] | None = None,
        memory_bytes: int | None = None,
    ):
        for flag in flags:
            name = flag.partition("=")[0]
            if name in _CHOSEN_HERE:
                raise UsageError(f"{name}: that is what is planned; leave it out{_CHOSEN_HERE[name]}")
        self._flags = flags
        self._source = source
        self._parser = parser
        self._system = system
        self._recompute = recompute
        self._sub_batches = sub_batches
        self._memory_bytes = memory_bytes
        self.announcements: set[str] = set()  # what the user has to know of how sure the costs are

    def best(
        self, *, world_size: int, flags: Sequence[str] = (), solutions: int = 3
    ) -> list[Candidate]:
        """The best plans for one layout, best first.

        Args:
            world_size: number of devices.
            flags: of the layout, where those of the training command do not say it.
            solutions: how many of the program's, for each number of sub-batches, are simulated.

        Raises:
            UsageError: none fits, or the flags or the source cannot be honoured.
        """
        from megatron.oases.cost.flags import system_of, workload_of

        source = self._source
        # How many sub-batches there are is chosen here, so that a training command need not know.
        own = ("--oases-schedule", "oases", "--oases-sub-batches", "1") if self._system == "oases" else ()
        args, config = self._parser.parse(
            [*self._flags, *flags, *own], available=source.available, world_size=world_size
        )
        workload = workload_of(args, config, on_cpu=source.on_cpu)
        if workload.recompute != "none":
            note = "--recompute-granularity: the plan says which blocks are recomputed; train without it"
            self.announcements.add(note)
        system = system_of(config, host_sees_completion=source.on_cpu)
        cost = source.cost(workload, args, system)
        search = Search(
            cost,
            workload,
            system,
            degrees=source.degrees,
            recomputation=RECOMPUTATION[self._recompute],
            memory_bytes=self._memory_bytes,
            best=solutions,
        )
        try:
            found = search.run(self._sub_batches_of(workload, system))
        except Infeasible as error:
            missing_bytes = error.least_bytes - self._memory_bytes
            raise UsageError(
                f"no plan fits: the smallest needs {error.least_bytes / GIB:.2f} GiB on a device, which has "
                f"{self._memory_bytes / GIB:.2f}; {missing_bytes / GIB:.2f} GiB are missing: use a smaller "
                "--micro-batch-size, a larger --tensor-model-parallel-size, --use-distributed-optimizer or "
                "--recompute choose"
            ) from None
        self.announcements |= source.announcements(cost)
        return found

    def best_layout(
        self,
        *,
        world_size: int,
        on_layouts: Callable[[Sequence[tuple[Layout, Candidate]], dict[Layout, str]], None],
    ) -> list[Candidate]:
        """The best plans of the layout whose first is the best of all.

        Args:
            world_size: number of devices.
            on_layouts: is given each layout with its best plan, best first, and why the others have none.

        Raises:
            UsageError: no layout has a plan.
        """
        found, refused = {}, {}
        for layout in layouts(self._flags, world_size=world_size):
            try:
                found[layout] = self.best(world_size=world_size, flags=layout.flags, solutions=1)
            except UsageError as error:
                refused[layout] = str(error).partition(": use a smaller")[0]
        ordered = sorted(found, key=lambda layout: found[layout][0].simulated.iteration_ms)
        on_layouts([(layout, found[layout][0]) for layout in ordered], refused)
        if not found:
            raise UsageError(f"--search-layout: none of {len(refused)} layouts has a plan; the table says why")
        return found[ordered[0]]

    def plan_of(self, candidate: Candidate) -> Plan:
        """What is written of it."""
        workload, simulated, solution = candidate.workload, candidate.simulated, candidate.solution
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
            schedule=SCHEDULES[self._system],
            sub_batches=workload.sub_batches,
            layers=candidate.layers,
            predicted=Predicted(
                by="simulator",
                iteration_ms=simulated.iteration_ms,
                exposed_ms=simulated.exposed_ms,
                in_flight_ms=simulated.stages[-1].in_flight_ms,
                waited_ms=simulated.stages[-1].waited_ms,
                memory_bytes=simulated.peak_bytes,
            ),
            solver=None
            if solution is None  # a uniform plan, which was simulated only
            else Solver(status=solution.status, gap=solution.gap, seconds=solution.seconds),
        )

    def _sub_batches_of(self, workload: Workload, system: System) -> list[int]:
        if system.is_vanilla:
            return [1]
        for count in self._sub_batches or ():
            if not 1 <= count <= workload.micro_batch:
                raise UsageError(f"--sub-batches {count}: a micro-batch has {workload.micro_batch} samples")
        return sorted(set(self._sub_batches or [1, min(2, workload.micro_batch)]))
