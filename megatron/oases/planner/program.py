"""The problem as a mixed-integer program, solved by HiGHS through SciPy.

    x[b,c] ∈ {0,1}    part b takes choice c                                   one each: `_choose_one`
    y[k,d,d'] ≥ 0     edge k goes from degree d to degree d'                  marginals of x: `_connect`
    e[j] ≥ 0          what slot j leaves exposed: at least t[j] - d[j]        `_hide`
    f[j] ≥ 0          of that, what weight gradients hide: at most e[j]       `_hide`
    p[j] ≥ 0          what is then left of them: p[j-1] + put off in j - f[j] `_hide`
    W ≥ 0             at least the working memory of every part               `_fit`

    minimise  micro-batches · Σ (computation · x + times · (e - f)) + Σ once · x
    subject to  Σ kept · x + W ≤ memory

t[j], d[j] and what is put off are linear in x and y: they come from the same function `slots` that evaluates a given
plan. The y are whole numbers by themselves once the x are.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from megatron.oases.planner.problem import Choice, Edge, Evaluation, Pass, Problem, evaluate, slots
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
        best: how many.
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
        memory = self._fit(limited=not smallest)
        if smallest:
            self._minimise(memory)
            return
        self._y = {(edge.before, edge.after): self._connect(edge) for edge in problem.edges}
        for forward in (True, False):
            self._hide(forward)
        for part, (times, table) in enumerate(zip(problem.repeats, problem.parts, strict=True)):
            for choice, cost in table.items():
                compute_ms = cost.forward.all_compute_ms + cost.backward.all_compute_ms
                ms = problem.micro_batches * compute_ms + cost.once_ms
                self._minimise(Expression({self._x[part][choice]: times * ms}))

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

    def _fit(self, *, limited: bool) -> Expression:
        problem, working = self._problem, self._variable()
        memory = Expression({working: 1.0})
        for times, table, x in zip(problem.repeats, problem.parts, self._x, strict=True):
            memory += Expression({x[choice]: times * cost.kept_bytes / GIB for choice, cost in table.items()})
            own = Expression({x[choice]: cost.working_bytes / GIB for choice, cost in table.items()})
            self._row(Expression({working: 1.0}) - own, 0.0, np.inf)
        if limited and problem.memory_bytes is not None:
            self._row(memory, -np.inf, problem.memory_bytes / GIB)
        return memory

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

    def _hide(self, forward: bool) -> None:
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

        put_off = Expression()
        for slot in slots(problem, forward=forward, cost=cost, between_ms=between_ms):
            if not problem.overlaps:
                self._minimise(slot.transfer_ms * (problem.micro_batches * slot.times))
                continue
            exposed, hidden = (Expression({self._variable(): 1.0}) for _ in range(2))
            self._row(exposed - slot.transfer_ms + slot.beside_ms, 0.0, np.inf)
            self._row(exposed - hidden, 0.0, np.inf)
            before, put_off = put_off, Expression({self._variable(): 1.0})
            self._row(put_off - before - (slot.movable_ms - hidden) * slot.times, 0.0, 0.0)
            self._minimise((exposed - hidden) * (problem.micro_batches * slot.times))

    def _exclude(self, choices: Sequence[Choice]) -> None:
        taken = {x[choice]: 1.0 for x, choice in zip(self._x, choices, strict=True)}
        self._row(Expression(taken), -np.inf, len(taken) - 1.0)

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
