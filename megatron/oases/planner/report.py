"""How plans look in a terminal, and why one was chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from megatron.oases.plan import Plan, format_degrees
from megatron.oases.planner.program import solve
from megatron.oases.planner.search import Candidate, scaled
from megatron.oases.sizes import GIB

_CHANGES = ((1.0, 1.2), (1.0, 0.8), (1.2, 1.0), (0.8, 1.0))


def degrees_of(candidate: Candidate) -> str:
    """The short form, as in --oases-degrees."""
    return format_degrees([layer.degrees for layer in candidate.layers])


def recomputed_of(candidate: Candidate) -> str:
    """Which share of the blocks is recomputed."""
    blocks = [block for layer in candidate.layers for block in (layer.attention, layer.mlp)]
    return f"{sum(block.recomputed for block in blocks)} of {len(blocks)}"


def plans_table(candidates: Sequence[Candidate], *, title: str) -> Table:
    """One row a plan; the first is the best, which the others are compared with."""
    table = Table(
        title=escape(title),
        title_justify="left",
        caption="By the program's formulas. Exposed: communication that nothing hides. Gradients, optimizer: their reduction over "
        "sub-groups and data parallelism, and Adam. Slower: than the first. Simulated: where the simulator can run the plan.",
        caption_justify="left",
    )
    for heading in ("plan", "degrees"):
        table.add_column(heading)
    for heading in ("recomputed\nblocks", "iteration\nms", "slower", "compute\nms", "exposed\nms", "gradients,\noptimizer", "memory\nGiB", "simulated\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    first_ms = candidates[0].evaluation.iteration_ms
    for candidate in candidates:
        evaluation, simulated = candidate.evaluation, candidate.simulated
        table.add_row(
            candidate.name,
            degrees_of(candidate),
            recomputed_of(candidate),
            f"{evaluation.iteration_ms:.1f}",
            f"{evaluation.iteration_ms / first_ms - 1:.1%}",
            f"{evaluation.compute_ms:.1f}",
            f"{evaluation.exposed_ms:.1f}",
            f"{evaluation.once_ms:.1f}",
            f"{evaluation.memory_bytes / GIB:.2f}",
            "–" if simulated is None else f"{simulated.iteration_ms:.1f}",
        )
    return table


def explanation(candidates: Sequence[Candidate]) -> Iterator[str]:
    """What binds for the first, and how close the next plan is."""
    best, evaluation = candidates[0], candidates[0].evaluation
    limit = best.problem.memory_bytes
    if limit is None:
        yield f"Memory: {evaluation.memory_bytes / GIB:.2f} GiB; no limit is known."
    else:
        left = (limit - evaluation.memory_bytes) / GIB
        free = _without_limit(best)
        yield f"Memory: {evaluation.memory_bytes / GIB:.2f} of {limit / GIB:.2f} GiB, {left:.2f} left."
        if free < evaluation.iteration_ms * (1 - 1e-3):
            yield f"Memory binds: without the limit the best plan would take {free:.1f} ms."
    share = evaluation.exposed_ms / evaluation.transfer_ms if evaluation.transfer_ms else 0.0
    yield (
        f"Of {evaluation.transfer_ms:.1f} ms of communication {evaluation.exposed_ms:.1f} ms ({share:.0%}) stay exposed, "
        f"beside {evaluation.compute_ms:.1f} ms of computation."
    )
    others = [candidate for candidate in candidates if candidate.layers != best.layers]
    if others:
        runner_up = min(others, key=lambda candidate: candidate.evaluation.iteration_ms)
        later = runner_up.evaluation.iteration_ms / evaluation.iteration_ms - 1
        yield f"Next best of the table: {degrees_of(runner_up)} ({runner_up.name}), {later:.1%} slower."


def changes_table(best: Candidate) -> Table:
    """The best plan if communication or computation took 20 % more or less."""
    table = Table(title="If it were otherwise", title_justify="left")
    for heading in ("communication", "computation", "degrees"):
        table.add_column(heading)
    table.add_column("iteration\nms", justify="right")
    for compute, communication in _CHANGES:
        problem = scaled(best.problem, compute=compute, communication=communication)
        (solution,) = solve(problem)
        other = Candidate(name="", workload=best.workload, problem=problem, choices=solution.choices)
        row = (f"x {communication:g}", f"x {compute:g}", degrees_of(other), f"{solution.evaluation.iteration_ms:.1f}")
        table.add_row(*row)
    return table


def differences_table(names: Sequence[str], plans: Sequence[Plan]) -> Table:
    """What differs between two plans, run-lengths for degrees and for recomputation."""
    table = Table(title="Differences", title_justify="left")
    for heading in ("", *names):
        table.add_column(escape(heading))
    for (name, first), (_, second) in zip(*(_facts(plan).items() for plan in plans), strict=True):
        if first != second:
            table.add_row(name, escape(first), escape(second))
    if not table.rows:
        table.add_row("none", "", "")
    return table


def _facts(plan: Plan) -> dict[str, str]:
    facts = {
        f"model: {field.name}": str(getattr(plan.model, field.name)) for field in fields(plan.model)
    }
    names = ("costs", "tensor", "data", "micro_batch", "micro_batches", "schedule", "sub_batches")
    facts |= {name: str(getattr(plan, name)) for name in names}
    recomputed = [f"{layer.attention.recomputed:d}/{layer.mlp.recomputed:d}" for layer in plan.layers]
    facts["degrees"] = plan.short_form
    facts["recomputed (attention/MLP)"] = ",".join(f"{each}x{len(list(run))}" for each, run in groupby(recomputed))
    predicted = plan.predicted
    facts["predicted iteration, ms"] = "–" if predicted is None else f"{predicted.iteration_ms:.1f}"
    facts["predicted exposed, ms"] = "–" if predicted is None else f"{predicted.exposed_ms:.1f}"
    facts["predicted memory, GiB"] = "–" if predicted is None else f"{predicted.memory_bytes / GIB:.2f}"
    return facts


def _without_limit(best: Candidate) -> float:
    (solution,) = solve(replace(best.problem, memory_bytes=None))
    return solution.evaluation.iteration_ms
