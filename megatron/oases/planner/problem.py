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

    stage     = all computation + all transfers that stay exposed + sending to other stages
    once      = reductions of gradients, optimizer; of what runs beside the last backward pass, what is longer than that
    iteration = sum of all stages + (micro-batches - 1) · the slowest stage + the largest once + fixed
    memory    = weights, gradients, optimizer + micro-batches in flight · activations + the most that one part needs
                while it runs, of each stage

With one stage that is micro-batches · stage + once + fixed. A stage of 1F1B has as many micro-batches in flight as
stages follow it, itself included.

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
        beside_last_ms: communication beside the last backward pass: data parallelism that overlaps.
        static_bytes: parameters, gradients, optimizer.
        kept_bytes: activations of a micro-batch from forward to backward.
        working_bytes: what it needs beyond that while it runs.
    """

    forward: Pass[float]
    backward: Pass[float]
    once_ms: float = 0.0
    beside_last_ms: float = 0.0
    static_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0


Table = Mapping[Choice, ChoiceCost]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Parts in order, how often they are repeated, always with the same choices, and in which pipeline stage."""

    parts: tuple[Table, ...]
    repeats: int = 1
    stage: int = 0

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
        send_ms: a micro-batch to the next pipeline stage, or its gradient back. The sender is busy meanwhile.
        fixed_ms: of an iteration, whatever is chosen.
        memory_bytes: of a device; None where it does not matter.
    """

    segments: tuple[Segment, ...]
    sub_batches: int
    overlaps: bool = True
    micro_batches: int = 1
    redistribution_ms: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    send_ms: float = 0.0
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
    def stages(self) -> tuple[range, ...]:
        """The parts of each pipeline stage."""
        stage_of = [segment.stage for segment in self.segments for _ in segment.parts]
        starts = [stage_of.index(stage) for stage in range(stage_of[-1] + 1)]
        return tuple(map(range, starts, [*starts[1:], len(stage_of)]))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once."""
        return min(len(self.stages) - stage, self.micro_batches)

    def sending_ms(self, stage: int) -> float:
        """Of a micro-batch."""
        return self.send_ms * ((stage > 0) + (stage < len(self.stages) - 1))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """In the order of the forward pass. Stages hand whole micro-batches on: between them there is none."""
        edges, first = [], 0
        for segment, following in zip(self.segments, [*self.segments[1:], None]):
            last = first + len(segment.parts) - 1
            edges += [Edge(part, part + 1, segment.repeats) for part in range(first, last)]
            if segment.repeats > 1:
                edges.append(Edge(last, first, segment.repeats - 1))
            if following is not None and following.stage == segment.stage:
                edges.append(Edge(last, last + 1, 1))
            first = last + 1
        return tuple(edges)

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
    parts: range,
    *,
    forward: bool,
    cost: Callable[[int], Pass[Ms]],
    between_ms: Callable[[int, int], Ms],
) -> Iterator[Slot[Ms]]:
    """The slots of a stage's pass, in its order: with numbers for a given plan, with linear expressions for a solver.

    Args:
        problem: its shape; the tables are not looked at.
        parts: of the stage.
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
    """What a plan costs by the formulas at the top of this file, in an iteration.

    Computation and transfers are those of the slowest stage, `once_ms` and memory of the stage that needs most.
    """

    iteration_ms: float
    compute_ms: float
    transfer_ms: float
    exposed_ms: float
    once_ms: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    compute_ms: float
    transfer_ms: float
    exposed_ms: float
    elapsed_ms: float
    once_ms: float
    memory_bytes: int


def evaluate(problem: Problem, choices: Sequence[Choice]) -> Evaluation:
    """The costs of one choice for each of `problem.parts`, without a solver."""
    stages = [_evaluate_stage(problem, choices, stage) for stage in range(len(problem.stages))]
    slowest = max(stages, key=lambda stage: stage.elapsed_ms)
    once_ms = max(stage.once_ms for stage in stages)
    running_ms = sum(stage.elapsed_ms for stage in stages) + (problem.micro_batches - 1) * slowest.elapsed_ms
    return Evaluation(
        iteration_ms=running_ms + once_ms + problem.fixed_ms,
        compute_ms=problem.micro_batches * slowest.compute_ms,
        transfer_ms=problem.micro_batches * slowest.transfer_ms,
        exposed_ms=problem.micro_batches * slowest.exposed_ms,
        once_ms=once_ms,
        memory_bytes=max(stage.memory_bytes for stage in stages),
    )


def _evaluate_stage(problem: Problem, choices: Sequence[Choice], stage: int) -> _Stage:
    parts = problem.stages[stage]
    costs = {part: problem.parts[part][choices[part]] for part in parts}
    passes = [
        list(
            slots(
                problem,
                parts,
                forward=forward,
                cost=lambda part, forward=forward: costs[part].forward if forward else costs[part].backward,
                between_ms=lambda before, after, forward=forward: problem.between_ms(
                    choices[before], choices[after], forward=forward
                ),
            )
        )
        for forward in (True, False)
    ]
    whole = [(problem.repeats[part], cost) for part, cost in costs.items()]
    backward_ms = sum(times * cost.backward.all_compute_ms for times, cost in whole)
    compute_ms = sum(times * cost.forward.all_compute_ms for times, cost in whole) + backward_ms
    transfer_ms = sum(slot.times * slot.transfer_ms for each in passes for slot in each)
    exposed_ms = sum(map(_exposed_ms, passes)) if problem.overlaps else transfer_ms
    beside_last_ms = sum(times * cost.beside_last_ms for times, cost in whole)
    in_flight = problem.in_flight(stage)
    kept_bytes = sum(times * (cost.static_bytes + in_flight * cost.kept_bytes) for times, cost in whole)
    return _Stage(
        compute_ms=compute_ms,
        transfer_ms=transfer_ms,
        exposed_ms=exposed_ms,
        elapsed_ms=compute_ms + exposed_ms + problem.sending_ms(stage),
        once_ms=sum(times * cost.once_ms for times, cost in whole) + max(0.0, beside_last_ms - backward_ms),
        memory_bytes=kept_bytes + max(cost.working_bytes for cost in costs.values()),
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
