"""How a comparison looks in a terminal."""

from rich.table import Table

from megatron.oases.report.comparison import WARM_UP_ITERATIONS, Comparison


def comparison_table(comparison: Comparison, *, title: str) -> Table:
    first = comparison.systems[0]
    iterations = sum(len(run.iterations_ms) - WARM_UP_ITERATIONS for run in first.rounds)
    table = Table(
        title=title,
        title_justify="left",
        caption=f"Medians of {iterations} iterations; losses against {first.name}'s first round.",
        caption_justify="left",
    )
    table.add_column("system", no_wrap=True)
    for heading in ("iteration\nms", "rounds\nms", "tokens/s", "speed-up", "largest loss\ndifference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system in comparison.systems:
        medians_ms = system.round_medians_ms
        table.add_row(
            system.name,
            f"{system.iteration_ms:.1f}",
            f"{min(medians_ms):.0f}-{max(medians_ms):.0f}",
            f"{system.tokens_per_s:.0f}",
            f"{comparison.speedup(system):.3f}",
            f"{comparison.loss_difference(system):.1e}",
        )
    return table
