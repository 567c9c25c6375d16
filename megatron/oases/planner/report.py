"""How plans look in a terminal, and why one was chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from megatron.oases.plan import LayerPlan, Plan, format_degrees
from megatron.oases.planner.layouts import Layout
from megatron.oases.planner.problem import Choice, Problem, evaluate
from megatron.oases.planner.program import solve
from megatron.oases.planner.search import Candidate, layers_of, scaled
from megatron.oases.sizes import GIB

_CHANGES = ((1.0, 1.2), (1.0, 0.8), (1.2, 1.0), (0.8, 1.0))


def degrees_of(layers: Sequence[LayerPlan]) -> str:
    """The short form, as in --oases-degrees."""
    return format_degrees([layer.degrees for layer in layers])


def recomputed_of(layers: Sequence[LayerPlan]) -> str:
    """Which share of the blocks is recomputed."""
    blocks = [block for layer in layers for block in (layer.attention, layer.mlp)]
    return f"{sum(block.recomputed for block in blocks)} of {len(blocks)}"


def plans_table(candidates: Sequence[Candidate], *, title: str) -> Table:
    """One row a plan; the first is the best, which the others are compared with."""
    table = Table(
        title=escape(title),
        title_justify="left",
        caption="Simulated, which decides; all columns but one are the simulator's. Formulas: what the program took the "
        "plan's iteration for. Exposed: what communication adds, gradients' too. Slower: than the first.",
        caption_justify="left",
    )
    for heading in ("plan", "degrees"):
        table.add_column(heading)
    times = ("iteration\nms", "slower", "formulas\nms", "compute\nms", "exposed\nms")
    for heading in ("recomputed\nblocks", *times, "memory\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    first_ms = candidates[0].simulated.iteration_ms
    for candidate in candidates:
        simulated = candidate.simulated
        table.add_row(
            candidate.name,
            degrees_of(candidate.layers),
            recomputed_of(candidate.layers),
            f"{simulated.iteration_ms:.1f}",
            f"{simulated.iteration_ms / first_ms - 1:.1%}",
            f"{candidate.evaluation.iteration_ms:.1f}",
            f"{simulated.compute_ms:.1f}",
            f"{simulated.exposed_ms:.1f}",
            f"{simulated.peak_bytes / GIB:.2f}",
        )
    return table


def layouts_table(found: Sequence[tuple[Layout, Candidate]], refused: Mapping[Layout, str]) -> Table:
    """One row a layout, with its best plan; then those without one, and why: one row where only micro-batches differ."""
    table = Table(title="Layouts", title_justify="left")
    for heading in ("TP", "PP", "DP", "micro-\nbatch", "sub-\nbatches", "iteration\nms", "memory\nGiB"):
        table.add_column(heading, justify="right", no_wrap=heading != "micro-\nbatch")
    table.add_column("degrees, or why not")
    for layout, best in found:
        simulated = best.simulated
        numbers = f"{simulated.iteration_ms:.1f}", f"{simulated.peak_bytes / GIB:.2f}"
        batches = str(layout.micro_batch), str(best.workload.sub_batches)
        table.add_row(*_sizes(layout), *batches, *numbers, degrees_of(best.layers))
    alike: dict[tuple[str, ...], list[int]] = {}
    for layout, reason in refused.items():
        alike.setdefault((*_sizes(layout), reason), []).append(layout.micro_batch)
    for (*sizes, reason), micro_batches in alike.items():
        table.add_row(*sizes, " ".join(map(str, micro_batches)), "", "", "", escape(reason))
    return table


def _sizes(layout: Layout) -> tuple[str, ...]:
    return str(layout.tensor), str(layout.pipeline), str(layout.data)


def explanation(candidates: Sequence[Candidate]) -> Iterator[str]:
    """What binds for the first, and how close the next plan is."""
    best, simulated = candidates[0], candidates[0].simulated
    limit, needed = best.problem.memory_bytes, simulated.peak_bytes
    if limit is None:
        yield f"Memory: {needed / GIB:.2f} GiB; no limit is known."
    else:
        yield f"Memory: {needed / GIB:.2f} of {limit / GIB:.2f} GiB, {(limit - needed) / GIB:.2f} left."
        free_ms = _without_limit(best)
        if free_ms < best.evaluation.iteration_ms * (1 - 1e-3):
            gain = 1 - free_ms / best.evaluation.iteration_ms
            yield f"Binding: memory. By the formulas a plan without the limit would be {gain:.1%} faster."
    if limit is None or free_ms >= best.evaluation.iteration_ms * (1 - 1e-3):
        communicates = simulated.exposed_ms > 0.05 * simulated.iteration_ms
        yield f"Binding: {'communication that nothing hides' if communicates else 'computation'}; memory does not."
    hidden = "" if simulated.hidden is None else f" ({1 - simulated.hidden:.0%})"
    yield (
        f"Of {simulated.communication_ms:.1f} ms of communication {simulated.exposed_ms:.1f} ms{hidden} stay exposed, "
        f"beside {simulated.compute_ms:.1f} ms of computation."
    )
    runner_up = next((each for each in candidates if each.layers != best.layers), None)
    if runner_up is not None:
        later = runner_up.simulated.iteration_ms / simulated.iteration_ms - 1
        yield f"Next best of the table: {degrees_of(runner_up.layers)} ({runner_up.name}), {later:.1%} slower."


def changes_table(best: Candidate) -> Table:
    """The best plan if communication or computation took 20 % more or less."""
    table = Table(
        title="If it were otherwise",
        title_justify="left",
        caption="By the program's formulas.",
        caption_justify="left",
    )
    for heading in ("communication", "computation", "degrees"):
        table.add_column(heading)
    table.add_column("recomputed\nblocks", justify="right")
    table.add_column("iteration\nms", justify="right")
    for compute, communication in _CHANGES:
        problem = scaled(best.problem, compute=compute, communication=communication)
        (solution,) = solve(problem)
        layers = layers_of(problem, solution.choices)
        iteration = f"{solution.evaluation.iteration_ms:.1f}"
        row = (f"x {communication:g}", f"x {compute:g}", degrees_of(layers), recomputed_of(layers), iteration)
        table.add_row(*row)
    return table


def degrees_table(best: Candidate) -> Table:
    """Why every change of degree pays, and why no other does: what the plan would be without it, or with one more."""
    problem, own = best.problem, best.evaluation
    table = Table(
        title="Why these degrees",
        title_justify="left",
        caption="By the program's formulas, the rest of the plan as it is. Re-distribution: between degrees, before any "
        "is hidden.",
        caption_justify="left",
    )
    table.add_column("if instead")
    for heading in ("iteration\nms", "slower", "re-distri-\nbution, ms", "memory\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for name, choices in (("as planned", best.choices), *_other_degrees(problem, best.choices)):
        other = evaluate(problem, choices)
        over_bytes = other.memory_bytes - (problem.memory_bytes or other.memory_bytes)
        table.add_row(
            name,
            f"{other.iteration_ms:.1f}",
            f"{other.iteration_ms / own.iteration_ms - 1:.1%}",
            f"{_redistribution_ms(problem, choices):.1f}",
            f"{other.memory_bytes / GIB:.2f}",
            f"{over_bytes / GIB:.2f} GiB too much" if over_bytes > 0 else "",
        )
    return table


def _other_degrees(problem: Problem, choices: Sequence[Choice]) -> Iterator[tuple[str, tuple[Choice, ...]]]:
    """Each run of blocks at the degree before it; then, for every degree, the best plan with one more change to it."""
    names = _block_names(problem)
    whole = choices[0].degree
    before = whole
    for degree, run in groupby(names, key=lambda part: choices[part].degree):
        parts = list(run)
        if degree != before:
            first, last = names[parts[0]], names[parts[-1]]
            where = first if len(parts) == 1 else f"{first} to {last}"
            yield f"{where} at {before}, not {degree}", _with_degree(choices, parts, before)
        before = degree
    degrees = sorted({choice.degree for part in names for choice in problem.parts[part]})
    for degree in degrees:
        others = [part for part in names if choices[part].degree != degree]
        if others:
            tried = {part: _with_degree(choices, [part], degree) for part in others}
            part = min(tried, key=lambda part: evaluate(problem, tried[part]).iteration_ms)
            yield f"{names[part]} at {degree}, not {choices[part].degree}", tried[part]


def _with_degree(choices: Sequence[Choice], parts: Sequence[int], degree: int) -> tuple[Choice, ...]:
    changed = {part: replace(choices[part], degree=degree) for part in parts}
    return tuple(changed.get(part, choice) for part, choice in enumerate(choices))


def _block_names(problem: Problem) -> dict[int, str]:
    """Of the parts that are blocks: `MLP of layers 3-4`."""
    names: dict[int, str] = {}
    part = layer = 0
    for segment in problem.segments:
        if len(segment.parts) == 2:
            last = layer + segment.repeats - 1
            layers = f"layer {layer}" if segment.repeats == 1 else f"layers {layer}-{last}"
            names |= {part: f"attention of {layers}", part + 1: f"MLP of {layers}"}
            layer = last + 1
        part += len(segment.parts)
    return names


def _redistribution_ms(problem: Problem, choices: Sequence[Choice]) -> float:
    """In an iteration."""
    return problem.micro_batches * sum(
        edge.times * problem.between_ms(choices[edge.before], choices[edge.after], forward=forward)
        for edge in problem.edges
        for forward in (True, False)
    )


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
    names = ("costs", "tensor", "pipeline", "data", "micro_batch", "micro_batches", "schedule", "sub_batches")
    facts |= {name: str(getattr(plan, name)) for name in names}
    facts["devices"] = "–" if plan.devices is None else plan.devices.name
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
