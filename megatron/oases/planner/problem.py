"""What the planner minimises, as tables: pure numbers, without a model, a cluster or a solver.

A chain of parts (embedding, attention, MLP, attention, …, head) runs forward and then backward. Each part `b` takes
one of its choices `c`, a TP degree and whether it is recomputed. The micro-batch is cut into `s` sub-batches, so that
the transfers of one are hidden by the computation of another:

    slot within b:   (s-1)/s of b's transfers         beside   (s-1)/s of b's computation
    slot behind b:   1/s of them, re-distribution too  beside   1/s of the next part's computation

A slot that transfers for `t` ms beside `d` ms of computation leaves `e = max(0, t - d)` exposed. In backward, weight
gradients may be put off: what has been put off so far, and was not used up by an earlier slot, hides more of it. So no
computation hides two transfers: what lies in a slot hides that slot's transfers alone, and each weight gradient is
spent once. Without an overlapping schedule nothing is hidden.

    iteration = micro-batches · (all computation + all transfers that stay exposed) + what each choice costs once + fixed
    memory    = what all choices keep + the most that one of them needs while it runs

Layers that are alike may be tied together in a segment, which repeats its parts: a model of 96 layers is then not a
larger problem than one of 12.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Ms = TypeVar("Ms")  # milliseconds: a number, or a linear expression of what is to be chosen


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """How a part runs. Embedding and head are never recomputed."""

    degree: int
    recomputed: bool = False

    def __str__(self) -> str:
        return f"{self.degree}{' recomputed' if self.recomputed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(Generic[Ms]):
    """A part in the forward or the backward pass of one micro-batch, all sub-batches together, in ms.

    Args:
        compute_ms: what the next part waits for.
        transfer_ms: collectives, alone.
        ahead_ms: computation that needs nothing from the parts before it in this pass: recomputation.
        movable_ms: computation that may be put off: weight gradients.
    """

    compute_ms: Ms = 0.0
    transfer_ms: Ms = 0.0
    ahead_ms: Ms = 0.0
    movable_ms: Ms = 0.0

    @property
    def all_compute_ms(self) -> Ms:
        return self.compute_ms + self.ahead_ms + self.movable_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceCost:
    """What one part costs under one choice.

    Args:
        once_ms: paid once an iteration, and hidden by nothing: reduction of gradients, the optimizer.
        kept_bytes: parameters, gradients, optimizer, and activations from forward to backward.
        working_bytes: what it needs beyond that while it runs.
    """

    forward: Pass[float]
    backward: Pass[float]
    once_ms: float = 0.0
    kept_bytes: int = 0
    working_bytes: int = 0


Table = Mapping[Choice, ChoiceCost]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Parts in order, and how often they are repeated, always with the same choices."""

    parts: tuple[Table, ...]
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1 or not self.parts or not all(self.parts):
            raise ValueError("a segment without parts, or a part without a choice")


@dataclass(frozen=True, slots=True)
class Edge:
    """Two parts that follow each other, by their number among all parts of all segments, and how often they do."""

    before: int
    after: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """All that a plan is chosen from.

    Args:
        segments: of the chain, in order.
        sub_batches: `s`.
        overlaps: whether a schedule hides transfers at all.
        micro_batches: of an iteration.
        redistribution_ms: from one degree to another, forward and then backward, of a whole micro-batch. Nothing where
            a pair is missing.
        fixed_ms: of an iteration, whatever is chosen.
        memory_bytes: of a device; None where it does not matter.
    """

    segments: tuple[Segment, ...]
    sub_batches: int
    overlaps: bool = True
    micro_batches: int = 1
    redistribution_ms: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    fixed_ms: float = 0.0
    memory_bytes: int | None = None

    @property
    def parts(self) -> tuple[Table, ...]:
        """Those of all segments, each once."""
        return tuple(part for segment in self.segments for part in segment.parts)

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often each of `parts` stands in the chain."""
        return tuple(segment.repeats for segment in self.segments for _ in segment.parts)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """In the order of the forward pass."""
        edges, first = [], 0
        for segment in self.segments:
            last = first + len(segment.parts) - 1
            edges += [Edge(part, part + 1, segment.repeats) for part in range(first, last)]
            if segment.repeats > 1:
                edges.append(Edge(last, first, segment.repeats - 1))
            edges.append(Edge(last, last + 1, 1))
            first = last + 1
        return tuple(edges[:-1])  # behind the last part there is none

    def between_ms(self, before: Choice, after: Choice, *, forward: bool) -> float:
        return self.redistribution_ms.get((before.degree, after.degree), (0.0, 0.0))[0 if forward else 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Generic[Ms]):
    """`times` equal stretches of a pass: what is transferred, what is computed beside it, what is put off until now."""

    times: int
    transfer_ms: Ms
    beside_ms: Ms
    movable_ms: Ms


def slots(
    problem: Problem,
    *,
    forward: bool,
    cost: Callable[[int], Pass[Ms]],
    between_ms: Callable[[int, int], Ms],
) -> Iterator[Slot[Ms]]:
    """The slots of a pass, in its order: with numbers for a given plan, with linear expressions for a solver.

    Args:
        problem: its shape; the tables are not looked at.
        forward: which pass.
        cost: of a part, by its number.
        between_ms: re-distribution between two parts that follow each other, by their numbers in forward order.
    """
    share = 1 / problem.sub_batches
    # What runs beside the last transfer of a part is another sub-batch of the next one: with one sub-batch, nothing.
    next_share = share if problem.sub_batches > 1 else 0.0
    behind: dict[int, list[tuple[int, int]]] = {}  # part → (the next one in this pass, how often)
    for edge in problem.edges:
        here, there = (edge.before, edge.after) if forward else (edge.after, edge.before)
        behind.setdefault(here, []).append((there, edge.times))
    parts = range(len(problem.parts))
    for part in parts if forward else reversed(parts):
        own = cost(part)
        yield Slot(
            times=problem.repeats[part],
            transfer_ms=own.transfer_ms * (1 - share),
            beside_ms=own.compute_ms * (1 - share),
            movable_ms=own.movable_ms * share,
        )
        rest = {"movable_ms": own.movable_ms * (1 - share)}
        for there, times in behind.get(part, []):
            transfer_ms = own.transfer_ms * share + between_ms(*((part, there) if forward else (there, part)))
            beside = cost(there)
            yield Slot(
                times=times,
                transfer_ms=transfer_ms,
                beside_ms=beside.compute_ms * next_share + beside.ahead_ms,
                **rest,
            )
        if part not in behind:
            yield Slot(times=1, transfer_ms=own.transfer_ms * share, beside_ms=own.compute_ms * 0.0, **rest)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a plan costs by the formulas at the top of this file, in an iteration."""

    iteration_ms: float
    compute_ms: float
    transfer_ms: float
    exposed_ms: float
    once_ms: float
    memory_bytes: int


def evaluate(problem: Problem, choices: Sequence[Choice]) -> Evaluation:
    """The costs of one choice for each of `problem.parts`, without a solver."""
    costs = [part[choice] for part, choice in zip(problem.parts, choices, strict=True)]
    passes = [
        list(
            slots(
                problem,
                forward=forward,
                cost=lambda part, forward=forward: costs[part].forward if forward else costs[part].backward,
                between_ms=lambda before, after, forward=forward: problem.between_ms(
                    choices[before], choices[after], forward=forward
                ),
            )
        )
        for forward in (True, False)
    ]
    whole = list(zip(problem.repeats, costs, strict=True))
    compute_ms = sum(times * (cost.forward.all_compute_ms + cost.backward.all_compute_ms) for times, cost in whole)
    transfer_ms = sum(slot.times * slot.transfer_ms for each in passes for slot in each)
    exposed_ms = sum(map(_exposed_ms, passes)) if problem.overlaps else transfer_ms
    once_ms = sum(times * cost.once_ms for times, cost in whole)
    kept_bytes = sum(times * cost.kept_bytes for times, cost in whole)
    return Evaluation(
        iteration_ms=problem.micro_batches * (compute_ms + exposed_ms) + once_ms + problem.fixed_ms,
        compute_ms=problem.micro_batches * compute_ms,
        transfer_ms=problem.micro_batches * transfer_ms,
        exposed_ms=problem.micro_batches * exposed_ms,
        once_ms=once_ms,
        memory_bytes=kept_bytes + max(cost.working_bytes for cost in costs),
    )


def _exposed_ms(slots_of_pass: Sequence[Slot[float]]) -> float:
    """Weight gradients are spent as early as they can be, which never leaves more exposed than another order."""
    exposed_ms = put_off_ms = 0.0
    for slot in slots_of_pass:
        put_off_ms += slot.times * slot.movable_ms
        left_ms = slot.times * max(0.0, slot.transfer_ms - slot.beside_ms)
        spent_ms = min(left_ms, put_off_ms)
        put_off_ms -= spent_ms
        exposed_ms += left_ms - spent_ms
    return exposed_ms
