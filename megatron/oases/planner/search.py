"""From a cost model to the plan that runs fastest, with what it was compared to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.model import CostModel
from megatron.oases.cost.result import Prediction
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.plan import BlockPlan, LayerPlan
from megatron.oases.planner.problem import Choice, Evaluation, Pass, Problem, Segment, evaluate
from megatron.oases.planner.program import Infeasible, Solution, solve
from megatron.oases.planner.tables import legal_degrees, problem_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and its costs.

    Args:
        name: for tables.
        workload: with its number of sub-batches.
        problem: that it is a plan for.
        choices: of each of the problem's parts.
        solution: where a solver found it.
        simulated: where the simulator knows how to run it: all blocks have degree T and are recomputed, or none is.
    """

    name: str
    workload: Workload
    problem: Problem
    choices: tuple[Choice, ...]
    solution: Solution | None = None
    simulated: Prediction | None = None

    @property
    def evaluation(self) -> Evaluation:
        return evaluate(self.problem, self.choices)

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """In order, each by itself."""
        layers: list[LayerPlan] = []
        choices = iter(self.choices[1:-1])
        for segment in self.problem.segments[1:-1]:
            attention, mlp = (
                BlockPlan(degree=each.degree, recomputed=each.recomputed) for each in (next(choices), next(choices))
            )
            layers += [LayerPlan(attention=attention, mlp=mlp)] * segment.repeats
        return tuple(layers)


def search(
    cost: CostModel,
    workload: Workload,
    system: System,
    *,
    degrees: Sequence[int] | None,
    sub_batches: Sequence[int],
    recomputation: Sequence[bool],
    memory_bytes: int | None,
) -> list[Candidate]:
    """The best plan for each number of sub-batches, best first.

    Args:
        cost: times of single operations, of the executor or, for a vanilla system, of Megatron.
        workload: without pipeline parallelism; its TP degree is T.
        system: who orders the operations.
        degrees: that the costs know; None for all.
        sub_batches: numbers to try.
        recomputation: whether blocks may be kept, recomputed, or both.
        memory_bytes: of a device.

    Raises:
        Infeasible: none fits.
    """
    candidates: list[Candidate] = []
    smallest: Infeasible | None = None
    for count in sub_batches:
        tried = replace(workload, sub_batches=count)
        problem = problem_of(
            cost,
            tried,
            degrees=[degree for degree in legal_degrees(tried) if degrees is None or degree in degrees],
            recomputation=recomputation,
            overlaps=not system.is_vanilla,
            memory_bytes=memory_bytes,
        )
        try:
            (solution,) = solve(problem)
        except Infeasible as error:
            smallest = min(error, smallest or error, key=lambda each: each.least_bytes)
            continue
        candidates.append(
            Candidate(
                name=f"plan, {count} sub-batch{'es' if count > 1 else ''}",
                workload=tried,
                problem=problem,
                choices=solution.choices,
                solution=solution,
            )
        )
    if not candidates:
        raise smallest
    found = (_simulated(candidate, cost, system) for candidate in candidates)
    return sorted(found, key=lambda each: each.evaluation.iteration_ms)


def uniform_plans(of: Candidate, cost: CostModel, system: System) -> Iterator[Candidate]:
    """Every degree for all blocks, kept and recomputed, as far as they are legal and fit."""
    problem = of.problem
    ends = problem.parts[0], problem.parts[-1]
    for choice in problem.parts[1]:
        choices = (*ends[0], *[choice] * (len(problem.parts) - 2), *ends[1])
        if problem.memory_bytes is not None and evaluate(problem, choices).memory_bytes > problem.memory_bytes:
            continue
        name = f"all {choice.degree}, {'recomputed' if choice.recomputed else 'kept'}"
        yield _simulated(replace(of, name=name, choices=choices, solution=None, simulated=None), cost, system)


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
    )


def _simulated(candidate: Candidate, cost: CostModel, system: System) -> Candidate:
    """With the simulator's prediction, where it can run the plan."""
    (first, *others) = candidate.choices[1:-1]
    if first.degree != candidate.workload.tensor or any(other != first for other in others):
        return candidate
    workload = replace(candidate.workload, recompute="full" if first.recomputed else "none")
    return replace(candidate, simulated=Simulator(cost).predict(workload, system))
