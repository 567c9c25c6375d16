"""planner/: the program's optimum against trying every plan, under the same cost model."""

import itertools
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from megatron.oases.planner.problem import Choice, ChoiceCost, Pass, Problem, Segment, evaluate
from megatron.oases.planner.program import Infeasible, solve

DEGREES = (1, 2, 4, 8)


def one_pass(random_: random.Random, degree: int, *, backward: bool) -> Pass:
    return Pass(
        compute_ms=random_.uniform(1, 10) / degree,
        transfer_ms=random_.uniform(0, 8) * (degree > 1),
        ahead_ms=random_.choice((0.0, random_.uniform(0, 4))) if backward else 0.0,
        movable_ms=random_.uniform(0, 5) / degree if backward else 0.0,
    )


def table(random_: random.Random, degrees, ways=(False,)) -> dict[Choice, ChoiceCost]:
    return {
        Choice(degree, recomputed): ChoiceCost(
            forward=one_pass(random_, degree, backward=False),
            backward=one_pass(random_, degree, backward=True),
            once_ms=random_.uniform(0, 2),
            beside_last_ms=random_.choice((0.0, random_.uniform(0, 12))),
            static_bytes=random_.randrange(1, 2**30) // degree,
            kept_bytes=random_.randrange(1, 2**30) // degree,
            working_bytes=random_.randrange(2**29),
        )
        for degree in degrees
        for recomputed in ways
    }


def problem(seed: int, *, layers: int, degrees=DEGREES, ways=(False,), stages: int = 1, **changes) -> Problem:
    random_ = random.Random(seed)
    end, segments = degrees[-1:], []
    for stage in range(stages):
        segments.append(Segment(parts=(table(random_, end),), stage=stage))
        for _ in range(layers):
            parts = tuple(table(random_, degrees, ways) for _ in range(2))
            segments.append(Segment(parts=parts, stage=stage))
        segments.append(Segment(parts=(table(random_, end),), stage=stage))
    redistribution_ms = {
        (before, after): (random_.uniform(0, 5), random_.uniform(0, 5))
        for before, after in itertools.permutations(degrees, 2)
    }
    fields = dict(
        segments=tuple(segments),
        sub_batches=random_.choice((1, 2, 3)),
        overlaps=random_.random() < 0.8,
        micro_batches=random_.choice((1, 4)),
        redistribution_ms=redistribution_ms,
        send_ms=random_.uniform(0, 3),
    )
    return Problem(**{**fields, **changes})


def all_plans(of: Problem):
    return itertools.product(*(part for part in of.parts))


def brute_force(of: Problem) -> float | None:
    """The least time of all plans that fit."""
    fitting = (
        evaluation.iteration_ms
        for choices in all_plans(of)
        if (evaluation := evaluate(of, choices)).memory_bytes <= (of.memory_bytes or evaluation.memory_bytes)
    )
    return min(fitting, default=None)


def median_memory(of: Problem) -> int:
    random_ = random.Random(0)
    needed = sorted(
        evaluate(of, [random_.choice(list(part)) for part in of.parts]).memory_bytes for _ in range(21)
    )
    return needed[10]


# Up to 8 blocks; with all degrees at 2 layers, with fewer at 4: 256 plans each. Half of them short of memory.
CASES = [(seed, 1 + seed % 2, DEGREES, (False,)) for seed in range(100)]
CASES += [(seed, 3 + seed % 2, (1, 4), (False,)) for seed in range(100, 160)]
CASES += [(seed, 1, (1, 4), (False, True)) for seed in range(160, 200)]


@pytest.mark.parametrize("part", range(10))
def test_no_plan_is_better(part):
    for seed, layers, degrees, ways in CASES[part::10]:
        of = problem(seed, layers=layers, degrees=degrees, ways=ways)
        if seed % 20 < 10:
            of = problem(seed, layers=layers, degrees=degrees, ways=ways, memory_bytes=median_memory(of))
        least_ms = brute_force(of)
        (solution,) = solve(of, gap=0.0)
        assert solution.evaluation.iteration_ms == pytest.approx(least_ms, rel=1e-6), seed
        assert of.memory_bytes is None or solution.evaluation.memory_bytes <= of.memory_bytes, seed


@pytest.mark.parametrize("part", range(4))
def test_no_plan_of_a_pipeline_is_better(part):
    for seed in range(300 + part, 340, 4):
        of = problem(seed, layers=1, degrees=(1, 4), ways=(False, True), stages=2)
        if seed % 8 < 4:
            of = replace(of, memory_bytes=median_memory(of))
        (solution,) = solve(of, gap=0.0)
        assert solution.evaluation.iteration_ms == pytest.approx(brute_force(of), rel=1e-6), seed


def test_a_pipeline_takes_as_long_as_its_slowest_stage_lets_it():
    one = problem(1, layers=1, degrees=(2,), memory_bytes=None, micro_batches=4, send_ms=0.0, fixed_ms=0.0)
    twice = [replace(segment, stage=stage) for stage in (0, 1) for segment in one.segments]
    both = replace(one, segments=tuple(twice))
    single, double = (evaluate(of, [Choice(2)] * len(of.parts)) for of in (one, both))
    alone_ms = (single.iteration_ms - single.once_ms) / 4
    assert double.iteration_ms == pytest.approx(5 * alone_ms + double.once_ms)
    assert evaluate(replace(both, send_ms=1.0), [Choice(2)] * 8).iteration_ms == pytest.approx(double.iteration_ms + 5)
    # The first of two stages holds two micro-batches.
    kept_bytes = sum(part[Choice(2)].kept_bytes for part in one.parts)
    assert double.memory_bytes == single.memory_bytes + kept_bytes
    assert evaluate(replace(both, micro_batches=1), [Choice(2)] * 8).memory_bytes == single.memory_bytes


def test_the_next_best_is_not_the_same_in_another_order():
    random_ = random.Random(2)
    layer = tuple(table(random_, (1, 2, 4)) for _ in range(2))
    end = Segment(parts=(table(random_, (4,)),))
    of = Problem(segments=(end, *[Segment(parts=layer, repeats=2)] * 3, end), sub_batches=2)
    by_counts = {}
    for choices in all_plans(of):
        counts = tuple(Counter(choices[part] for part in parts) for parts in (range(1, 7, 2), range(2, 7, 2)))
        key = tuple(frozenset(count.items()) for count in counts)
        ms = evaluate(of, choices).iteration_ms
        by_counts[key] = min(ms, by_counts.get(key, ms))
    found = solve(of, best=6, gap=0.0)
    expected = sorted(by_counts.values())[:6]
    assert [solution.evaluation.iteration_ms for solution in found] == pytest.approx(expected, rel=1e-6)


def test_the_best_few_in_order():
    of = problem(7, layers=1)
    every = sorted(evaluate(of, choices).iteration_ms for choices in all_plans(of))
    found = [solution.evaluation.iteration_ms for solution in solve(of, best=5, gap=0.0)]
    assert found == pytest.approx(every[:5], rel=1e-6)
    assert len(solve(of, best=100, gap=0.0)) == len(every) == 16


def test_what_does_not_fit_says_how_much_would():
    of = problem(3, layers=2)
    least_bytes = min(evaluate(of, choices).memory_bytes for choices in all_plans(of))
    with pytest.raises(Infeasible) as none:
        solve(problem(3, layers=2, memory_bytes=least_bytes - 2**20))
    assert none.value.least_bytes == least_bytes
    assert evaluate(of, none.value.choices).memory_bytes == least_bytes
    solve(problem(3, layers=2, memory_bytes=least_bytes + 2**20))


def constant(compute_ms: float, transfer_ms: float, movable_ms: float = 0.0) -> dict[Choice, ChoiceCost]:
    forward = Pass(compute_ms=compute_ms, transfer_ms=transfer_ms)
    backward = Pass(compute_ms=compute_ms, transfer_ms=transfer_ms, movable_ms=movable_ms)
    return {Choice(2): ChoiceCost(forward=forward, backward=backward)}


def exposed_ms(*parts, **fields) -> float:
    of = Problem(segments=tuple(Segment(parts=(part,)) for part in parts), **fields)
    return evaluate(of, [Choice(2)] * len(parts)).exposed_ms


def test_no_computation_hides_two_transfers():
    # Each of three parts transfers as long as it computes. The last one's second half has nothing beside it.
    assert exposed_ms(*[constant(4, 4)] * 3, sub_batches=2) == pytest.approx(2 * 2)
    # Twice as long: of every half-transfer of 4 a half-computation of 2 hides 2, once.
    assert exposed_ms(*[constant(4, 8)] * 3, sub_batches=2) == pytest.approx(2 * (5 * 2 + 4))


def test_weight_gradients_are_spent_once():
    without = exposed_ms(*[constant(4, 8)] * 3, sub_batches=2)
    assert exposed_ms(*[constant(4, 8, movable_ms=1)] * 3, sub_batches=2) == pytest.approx(without - 3)
    # At most what is exposed in backward.
    assert exposed_ms(*[constant(4, 8, movable_ms=90)] * 3, sub_batches=2) == pytest.approx(without / 2)


def test_one_sub_batch_and_no_overlap_hide_nothing():
    assert exposed_ms(*[constant(4, 3)] * 2, sub_batches=1) == pytest.approx(4 * 3)
    assert exposed_ms(*[constant(4, 3, movable_ms=9)] * 2, sub_batches=2, overlaps=False) == pytest.approx(4 * 3)


def test_repeats_are_like_as_many_segments():
    random_ = random.Random(5)
    layer = tuple(table(random_, (1, 2)) for _ in range(2))
    end = Segment(parts=(table(random_, (2,)),))
    between_ms = {(1, 2): (1.0, 2.0), (2, 1): (0.5, 0.25)}
    for choices in all_plans(Problem(segments=(Segment(parts=layer),), sub_batches=2)):
        short = Problem(
            segments=(end, Segment(parts=layer, repeats=3), end),
            sub_batches=2, overlaps=False, redistribution_ms=between_ms,
        )  # fmt: skip
        long = Problem(
            segments=(end, *[Segment(parts=layer)] * 3, end),
            sub_batches=2, overlaps=False, redistribution_ms=between_ms,
        )  # fmt: skip
        tied = evaluate(short, [Choice(2), *choices, Choice(2)])
        assert tied.iteration_ms == pytest.approx(
            evaluate(long, [Choice(2), *choices * 3, Choice(2)]).iteration_ms
        )


def test_a_slower_link_never_makes_a_plan_faster_and_lowers_degrees():
    def at(factor: float) -> Problem:
        def part(degrees) -> dict[Choice, ChoiceCost]:
            return {
                Choice(degree): ChoiceCost(
                    forward=Pass(compute_ms=8 / degree, transfer_ms=factor * (degree > 1)),
                    backward=Pass(compute_ms=8 / degree, transfer_ms=factor * (degree > 1), movable_ms=8 / degree),
                )
                for degree in degrees
            }

        end, layer = Segment(parts=(part((4,)),)), Segment(parts=(part((1, 2, 4)), part((1, 2, 4))))
        return Problem(segments=(end, *[layer] * 3, end), sub_batches=2)

    (fast,), (slow,) = solve(at(0.1)), solve(at(100.0))
    assert {choice.degree for choice in fast.choices} == {4}
    assert {choice.degree for choice in slow.choices[1:-1]} == {1}
    assert slow.evaluation.iteration_ms > fast.evaluation.iteration_ms


def test_96_layers_with_6_degrees_and_recomputation():
    """192 blocks, tied in 8 segments of 12 layers."""
    random_ = random.Random(11)
    degrees = (1, 2, 4, 8, 16, 32)
    layer = tuple(table(random_, degrees, (False, True)) for _ in range(2))
    end = Segment(parts=(table(random_, (32,)),))
    of = Problem(
        segments=(end, *[Segment(parts=layer, repeats=12)] * 8, end),
        sub_batches=2,
        redistribution_ms={pair: (1.0, 1.0) for pair in itertools.permutations(degrees, 2)},
    )
    limited = replace(of, memory_bytes=median_memory(of))
    start_s = time.perf_counter()
    (solution,) = solve(limited)
    print(f"{time.perf_counter() - start_s:.1f} s")
    assert solution.evaluation.memory_bytes <= limited.memory_bytes
    for _ in range(200):
        choices = [random_.choice(list(part)) for part in of.parts]
        other = evaluate(limited, choices)
        fits = other.memory_bytes <= limited.memory_bytes
        assert not fits or other.iteration_ms >= solution.evaluation.iteration_ms * (1 - 1e-3)
