"""The problem as a mixed-integer program, solved by HiGHS through SciPy.

    x[b,c] ∈ {0,1}    part b takes choice c                                     one each: `_choose_one`
    y[k,d,d'] ≥ 0     edge k goes from degree d to degree d'                    marginals of x: `_connect`
    e[j] ≥ 0          what slot j leaves exposed: at least t[j] - d[j]          `_hide`
    f[j] ≥ 0          of that, what weight gradients hide: at most e[j]         `_hide`
    p[j] ≥ 0          what is then left of them: p[j-1] + put off in j - f[j]   `_hide`
    L[s] ≥ 0          what stage s has beside its last backward pass, and is longer than that   `_once`
    W[s] ≥ 0          at least the working memory of every part of stage s      `_memory`
    S, O ≥ 0          at least every stage's time, and what it costs once       `_largest`

    minimise  Σ T[s] + (micro-batches - 1) · S + O
    where     T[s] = Σ computation · x + times · (e - f) + sending,   O[s] = Σ once · x + L[s]
    subject to  Σ (static + in flight · kept) · x + W[s] ≤ memory for every stage s

The next best plan differs from those before in how often some choice is taken, by parts that are alike: `_exclude`.
To put the same layers into another order is not another plan.

t[j], d[j] and what is put off are linear in x and y: they come from the same function `slots` that evaluates a given
plan. The y are whole numbers by themselves once the x are.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from megatron.oases.planner.problem import Choice, ChoiceCost, Edge, Evaluation, Pass, Problem, evaluate, slots
from megatron.oases.sizes import GIB  # in which bytes are counted: the solver wants numbers of similar size


@dataclass(frozen=True, slots=True)
class Expression:
    """A linear expression: coefficients by variable."""

    terms: dict[int, float] = field(default_factory=dict)

    def __add__(self, other: "Expression") -> "Expression":
        terms = dict(self.terms)
        for variable, factor in other.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor
        return Expression(terms)

    def __mul__(self, factor: float) -> "Expression":
        return Expression({variable: factor * own for variable, own in self.terms.items()})

    def __sub__(self, other: "Expression") -> "Expression":
        return self + other * -1.0


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best plan that was found.

    Args:
        choices: of each of the problem's parts.
        evaluation: by `evaluate`, not by the solver.
        status: in the solver's words.
        gap: how much better, relatively, a plan might be at most.
        seconds: that the solver took.
    """

    choices: tuple[Choice, ...]
    evaluation: Evaluation
    status: str
    gap: float
    seconds: float


class Infeasible(Exception):
    """No plan fits into memory.

    Args:
        least_bytes: what the smallest plan needs.
        choices: that plan.
    """

    def __init__(self, least_bytes: int, choices: tuple[Choice, ...]):
        super().__init__(f"the smallest plan needs {least_bytes / GIB:.2f} GiB")
        self.least_bytes = least_bytes
        self.choices = choices


def solve(problem: Problem, *, best: int = 1, gap: float = 1e-3, limit_s: float = 60.0) -> list[Solution]:
    """The best plans, best first; fewer than asked for where there are no more.

    Args:
        problem: what is minimised.
        best: how many, no two of which take the same choices equally often.
        gap: relative gap at which the solver stops.
        limit_s: time for each of them.

    Raises:
        Infeasible: not even one fits into memory.
        RuntimeError: the solver found none within its time.
    """
    program = _Program(problem)
    solutions: list[Solution] = []
    for choices, status, reached, seconds in program.solutions(best, gap=gap, limit_s=limit_s):
        evaluation = evaluate(problem, choices)
        solutions.append(
            Solution(choices=choices, evaluation=evaluation, status=status, gap=reached, seconds=seconds)
        )
    if not solutions:
        smallest = _Program(problem, smallest=True)
        ((choices, *_),) = smallest.solutions(1, gap=0.0, limit_s=limit_s)
        raise Infeasible(evaluate(problem, choices).memory_bytes, choices)
    return sorted(solutions, key=lambda solution: solution.evaluation.iteration_ms)


class _Program:
    """`smallest`: minimises memory instead of time, and does not limit it."""

    def __init__(self, problem: Problem, *, smallest: bool = False):
        self._problem = problem
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._x = [
            {choice: self._variable(upper=1.0, whole=True) for choice in part} for part in problem.parts
        ]
        self._choose_one()
        memory = [self._memory(stage) for stage in range(len(problem.stages))]
        if smallest:
            self._minimise(self._largest(memory))
            return
        if problem.memory_bytes is not None:
            for each in memory:
                self._row(each, -np.inf, problem.memory_bytes / GIB)
        self._y = {(edge.before, edge.after): self._connect(edge) for edge in problem.edges}
        stages_ms = [self._stage_ms(stage) for stage in range(len(problem.stages))]
        for stage_ms in stages_ms:
            self._minimise(stage_ms)
        sending_ms = [problem.sending_ms(stage) for stage in range(len(problem.stages))]
        self._minimise(self._largest(stages_ms, sending_ms) * (problem.micro_batches - 1))
        self._minimise(self._largest([self._once(stage) for stage in range(len(problem.stages))]))

    def solutions(
        self, count: int, *, gap: float, limit_s: float
    ) -> Iterator[tuple[tuple[Choice, ...], str, float, float]]:
        """(choices, status, gap, seconds), each without those before."""
        for _ in range(count):
            start_s = time.perf_counter()
            result = self._solve(gap=gap, limit_s=limit_s)
            if result.x is None:
                if result.status != 2:  # infeasible
                    raise RuntimeError(f"HiGHS: {result.message}")
                return
            taken = [max(x, key=lambda choice: result.x[x[choice]]) for x in self._x]
            yield tuple(taken), result.message, float(result.mip_gap), time.perf_counter() - start_s
            self._exclude(taken)

    def _solve(self, *, gap: float, limit_s: float):
        entries = [(i, variable, factor) for i, (row, _, _) in enumerate(self._rows) for variable, factor in row.items()]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = csr_matrix((factors, (rows, columns)), shape=(len(self._rows), len(self._costs)))
        whole = np.zeros(len(self._costs))
        whole[self._whole] = 1
        return milp(
            np.array(self._costs),
            integrality=whole,
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(matrix, [row[1] for row in self._rows], [row[2] for row in self._rows]),
            options={"mip_rel_gap": gap, "time_limit": limit_s},
        )

    def _choose_one(self) -> None:
        for x in self._x:
            self._row(Expression(dict.fromkeys(x.values(), 1.0)), 1.0, 1.0)

    def _sum(self, parts: Iterable[int], cost: Callable[[ChoiceCost], float]) -> Expression:
        """Over all parts, each as often as it is repeated: linear in x."""
        problem = self._problem
        return Expression({
            variable: problem.repeats[part] * cost(problem.parts[part][choice])
            for part in parts
            for choice, variable in self._x[part].items()
        })

    def _largest(self, expressions: Sequence[Expression], constants: Sequence[float] = ()) -> Expression:
        """At least every expression plus its constant. Of a single one, itself without the constant."""
        if len(expressions) == 1:
            return expressions[0]
        largest = Expression({self._variable(): 1.0})
        for expression, constant in zip_longest(expressions, constants, fillvalue=0.0):
            self._row(largest - expression, constant, np.inf)
        return largest

    def _memory(self, stage: int) -> Expression:
        """In GiB."""
        problem, parts = self._problem, self._problem.stages[stage]
        working, in_flight = Expression({self._variable(): 1.0}), problem.in_flight(stage)
        for part in parts:
            own = {x: problem.parts[part][choice].working_bytes / GIB for choice, x in self._x[part].items()}
            self._row(working - Expression(own), 0.0, np.inf)
        return working + self._sum(parts, lambda cost: (cost.static_bytes + in_flight * cost.kept_bytes) / GIB)

    def _stage_ms(self, stage: int) -> Expression:
        """Of a micro-batch, without sending."""
        parts = self._problem.stages[stage]
        compute_ms = self._sum(parts, lambda cost: cost.forward.all_compute_ms + cost.backward.all_compute_ms)
        return compute_ms + self._hide(parts, forward=True) + self._hide(parts, forward=False)

    def _once(self, stage: int) -> Expression:
        problem, parts = self._problem, self._problem.stages[stage]
        once_ms = self._sum(parts, lambda cost: cost.once_ms)
        if not any(cost.beside_last_ms for part in parts for cost in problem.parts[part].values()):
            return once_ms
        left = Expression({self._variable(): 1.0})
        beside = self._sum(parts, lambda cost: cost.beside_last_ms - cost.backward.all_compute_ms)
        self._row(left - beside, 0.0, np.inf)
        return once_ms + left

    def _connect(self, edge: Edge) -> dict[tuple[int, int], int]:
        before, after = self._x[edge.before], self._x[edge.after]
        froms, tos = ({choice.degree for choice in x} for x in (before, after))
        y = {(start, end): self._variable(upper=1.0) for start in sorted(froms) for end in sorted(tos)}
        for degree in froms:
            leaving = Expression({y[degree, end]: 1.0 for end in tos})
            self._row(leaving - _at(before, degree), 0.0, 0.0)
        for degree in tos:
            arriving = Expression({y[start, degree]: 1.0 for start in froms})
            self._row(arriving - _at(after, degree), 0.0, 0.0)
        return y

    def _hide(self, parts: range, *, forward: bool) -> Expression:
        """What a pass of a stage leaves exposed."""
        problem = self._problem

        def cost(part: int) -> Pass[Expression]:
            def of(name: str) -> Expression:
                return Expression({
                    self._x[part][choice]: getattr(each.forward if forward else each.backward, name)
                    for choice, each in problem.parts[part].items()
                })

            return Pass(**{name: of(name) for name in ("compute_ms", "transfer_ms", "ahead_ms", "movable_ms")})

        def between_ms(before: int, after: int) -> Expression:
            return Expression({
                variable: problem.between_ms(Choice(start), Choice(end), forward=forward)
                for (start, end), variable in self._y[before, after].items()
            })

        exposed_ms = put_off = Expression()
        for slot in slots(problem, parts, forward=forward, cost=cost, between_ms=between_ms):
            if not problem.overlaps:
                exposed_ms += slot.transfer_ms * slot.times
                continue
            exposed, hidden = (Expression({self._variable(): 1.0}) for _ in range(2))
            self._row(exposed - slot.transfer_ms + slot.beside_ms, 0.0, np.inf)
            self._row(exposed - hidden, 0.0, np.inf)
            before, put_off = put_off, Expression({self._variable(): 1.0})
            self._row(put_off - before - (slot.movable_ms - hidden) * slot.times, 0.0, 0.0)
            exposed_ms += (exposed - hidden) * slot.times
        return exposed_ms

    def _exclude(self, choices: Sequence[Choice]) -> None:
        """Some choice must be taken more often, n > n*, by parts that are alike: n ≥ (n* + 1) · u, Σ u ≥ 1."""
        problem, more = self._problem, {}
        for alike in self._alike():
            for choice in problem.parts[alike[0]]:
                taken = sum(problem.repeats[part] for part in alike if choices[part] == choice)
                count = {self._x[part][choice]: float(problem.repeats[part]) for part in alike}
                if taken < sum(count.values()):
                    variable = self._variable(upper=1.0, whole=True)
                    more[variable] = 1.0
                    self._row(Expression({**count, variable: -(taken + 1.0)}), 0.0, np.inf)
        self._row(Expression(more), 1.0, np.inf)

    def _alike(self) -> list[list[int]]:
        """Parts that choose from the same table."""
        found: list[list[int]] = []
        for part, table in enumerate(self._problem.parts):
            alike = next((parts for parts in found if self._problem.parts[parts[0]] == table), None)
            if alike is None:
                found.append([part])
            else:
                alike.append(part)
        return found

    def _variable(self, *, upper: float = np.inf, whole: bool = False) -> int:
        self._costs.append(0.0)
        self._upper.append(upper)
        if whole:
            self._whole.append(len(self._costs) - 1)
        return len(self._costs) - 1

    def _row(self, expression: Expression, lower: float, upper: float) -> None:
        self._rows.append((expression.terms, lower, upper))

    def _minimise(self, expression: Expression) -> None:
        for variable, factor in expression.terms.items():
            self._costs[variable] += factor


def _at(x: dict[Choice, int], degree: int) -> Expression:
    """Whether a part has that degree."""
    return Expression({variable: 1.0 for choice, variable in x.items() if choice.degree == degree})
