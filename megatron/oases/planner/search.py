"""From a cost model to the plan that runs fastest, with what it was compared to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.model import CostModel
from megatron.oases.cost.result import Prediction
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.plan import BlockPlan, LayerPlan, legal_degrees
from megatron.oases.planner.problem import Choice, Evaluation, Pass, Problem, Segment, evaluate
from megatron.oases.planner.program import Infeasible, Solution, solve
from megatron.oases.planner.tables import problem_of

# How often the program gets less memory than there is, because what fits by its formulas did not when simulated.
_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, what the program's formulas say of it, and what the simulator says, which decides.

    Args:
        name: for tables.
        workload: with its number of sub-batches, degrees and recomputation.
        problem: that it is a plan for.
        choices: of each of the problem's parts.
        simulated: by the schedule's own lists.
        solution: where a solver found it.
    """

    name: str
    workload: Workload
    problem: Problem
    choices: tuple[Choice, ...]
    simulated: Prediction
    solution: Solution | None = None

    @property
    def evaluation(self) -> Evaluation:
        return evaluate(self.problem, self.choices)

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """In order, each by itself."""
        return layers_of(self.problem, self.choices)


def layers_of(problem: Problem, choices: Sequence[Choice]) -> tuple[LayerPlan, ...]:
    """Every layer of a choice for each of the problem's parts."""
    layers: list[LayerPlan] = []
    remaining = iter(choices)
    for segment in problem.segments:
        own = [BlockPlan(degree=each.degree, recomputed=each.recomputed) for _, each in zip(segment.parts, remaining)]
        if len(own) == 2:  # else an end of a stage
            layers += [LayerPlan(attention=own[0], mlp=own[1])] * segment.repeats
    return tuple(layers)


class Search:
    """Looks for the best plan of one workload.

    Args:
        cost: times of single operations.
        workload: its TP degree is T.
        system: who orders the operations.
        degrees: that the costs know; None for all.
        recomputation: whether blocks may be kept, recomputed, or both.
        memory_bytes: of a device; None where it does not matter.
        best: how many of the program's best plans are simulated, for each number of sub-batches.
    """

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        system: System,
        *,
        degrees: Sequence[int] | None,
        recomputation: Sequence[bool],
        memory_bytes: int | None,
        best: int = 3,
    ):
        self._cost = cost
        self._simulator = Simulator(cost)
        self._workload = workload
        self._system = system
        self._degrees = degrees
        self._recomputation = recomputation
        self._memory_bytes = memory_bytes
        self._best = best

    def run(self, sub_batches: Sequence[int]) -> list[Candidate]:
        """The program's best plans and all uniform ones that fit, best first by the simulator.

        Args:
            sub_batches: numbers to try.

        Raises:
            Infeasible: none fits.
        """
        found: list[Candidate] = []
        smallest: list[Infeasible] = []
        for count in sub_batches:
            problem = self._problem(replace(self._workload, sub_batches=count))
            try:
                found += self._planned(problem, count)
            except Infeasible as error:
                smallest.append(error)
            found += filter(self._fits, self._uniform(problem, count))
        if not found:
            raise min(smallest, key=lambda each: each.least_bytes)
        return sorted(_distinct(found), key=lambda each: each.simulated.iteration_ms)

    def _problem(self, workload: Workload) -> Problem:
        legal = legal_degrees(workload.tensor, micro_batch=workload.micro_batch, sub_batches=workload.sub_batches)
        return problem_of(
            self._cost,
            workload,
            self._system,
            degrees=[degree for degree in legal if self._degrees is None or degree in self._degrees],
            recomputation=self._recomputation,
            memory_bytes=self._memory_bytes,
        )

    def _planned(self, problem: Problem, count: int) -> list[Candidate]:
        """Those that fit when they are simulated. The formulas' memory is near that, not equal."""
        name = f"plan, {count} sub-batch{'es' if count > 1 else ''}"
        limited = problem
        for _ in range(_TRIES):
            try:
                solutions = solve(limited, best=self._best)
            except Infeasible as error:
                least = self._candidate(problem, error.choices, name, count)
                if self._fits(least):
                    return [least]
                raise Infeasible(least.simulated.peak_bytes, error.choices) from None
            found = [replace(self._candidate(problem, each.choices, name, count), solution=each) for each in solutions]
            fitting = [each for each in found if self._fits(each)]
            if fitting:
                return fitting
            overlooked = min(each.simulated.peak_bytes - each.evaluation.memory_bytes for each in found)
            limited = replace(limited, memory_bytes=max(self._memory_bytes - overlooked, 0))
        raise Infeasible(min(each.simulated.peak_bytes for each in found), solutions[0].choices)

    def _uniform(self, problem: Problem, count: int) -> Iterator[Candidate]:
        """Every degree for all blocks, kept and recomputed."""
        layer = next(segment for segment in problem.segments if len(segment.parts) == 2)
        for choice in layer.parts[0]:
            choices = tuple(
                choice if len(segment.parts) == 2 else next(iter(part))
                for segment in problem.segments
                for part in segment.parts
            )
            kept = "recomputed" if choice.recomputed else "kept"
            yield self._candidate(problem, choices, f"all {choice.degree}, {kept}, {count} sub", count)

    def _candidate(self, problem: Problem, choices: tuple[Choice, ...], name: str, count: int) -> Candidate:
        blocks = [block for layer in layers_of(problem, choices) for block in (layer.attention, layer.mlp)]
        recomputed = tuple(block.recomputed for block in blocks)
        workload = replace(
            self._workload,
            sub_batches=count,
            degrees=tuple(block.degree for block in blocks),
            recomputed=recomputed,
            recompute="full" if all(recomputed) else "none",
        )
        simulated = self._simulator.predict(workload, self._system)
        return Candidate(name=name, workload=workload, problem=problem, choices=choices, simulated=simulated)

    def _fits(self, candidate: Candidate) -> bool:
        return self._memory_bytes is None or candidate.simulated.peak_bytes <= self._memory_bytes


def _distinct(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Each plan once, the program's before uniform ones that are the same."""
    seen = set()
    for candidate in candidates:
        if candidate.workload not in seen:
            seen.add(candidate.workload)
            yield candidate


def scaled(problem: Problem, *, compute: float = 1.0, communication: float = 1.0) -> Problem:
    """The same problem on a device, or with links, that much slower."""

    def scaled_pass(each: Pass[float]) -> Pass[float]:
        return Pass(
            compute_ms=compute * each.compute_ms,
            transfer_ms=communication * each.transfer_ms,
            ahead_ms=compute * each.ahead_ms,
            movable_ms=compute * each.movable_ms,
        )

    def scaled_segment(segment: Segment) -> Segment:
        parts = tuple(
            {
                choice: replace(cost, forward=scaled_pass(cost.forward), backward=scaled_pass(cost.backward))
                for choice, cost in part.items()
            }
            for part in segment.parts
        )
        return replace(segment, parts=parts)

    return replace(
        problem,
        segments=tuple(map(scaled_segment, problem.segments)),
        redistribution_ms={
            pair: (communication * forward, communication * backward)
            for pair, (forward, backward) in problem.redistribution_ms.items()
        },
        send_ms=communication * problem.send_ms,
    )
