"""How a comparison looks in a terminal."""

from rich.console import Console
from rich.table import Table

from megatron.oases.report.comparison import WARM_UP_ITERATIONS, Comparison

_WIDTH_IN_FILES = 150
_BOUND_CAPTION = (
    "Compute only: without the tensor-parallel collectives. Communication only: these collectives alone. "
    "Bound: the slower of the two. Efficiency: bound / measured. Hidden: share of the communication."
)


def output_console() -> Console:
    """Standard output; where that is no terminal, with a width of which the tables lose nothing."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_IN_FILES)


def comparison_table(comparison: Comparison, *, title: str) -> Table:
    first = comparison.systems[0]
    rounds = len(first.rounds)
    iterations = len(first.rounds[0].iterations_ms)
    table = Table(
        title=title,
        title_justify="left",
        caption=f"Medians over {rounds} {'round' if rounds == 1 else 'rounds'} of {iterations} iterations, without the "
        f"first {WARM_UP_ITERATIONS} of each; losses against {first.name}'s first round.",
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
            f"{min(medians_ms):.0f}-{max(medians_ms):.0f}" if rounds > 1 else "–",
            f"{system.tokens_per_s:.0f}",
            f"{comparison.speedup(system):.3f}",
            f"{comparison.loss_difference(system):.1e}",
        )
    return table


def bound_table(comparison: Comparison) -> Table:
    """For a comparison whose halves were measured."""
    table = Table(
        title="Against the bound",
        title_justify="left",
        caption=_BOUND_CAPTION,
        caption_justify="left",
    )
    table.add_column("system", no_wrap=True)
    headings = ("measured\nms", "compute\nonly, ms", "communication\nonly, ms", "bound\nms", "efficiency", "hidden")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for system in comparison.systems:
        bound = system.bound
        table.add_row(
            system.name,
            f"{bound.measured_ms:.0f}",
            f"{bound.compute_only_ms:.0f}",
            f"{bound.communication_only_ms:.0f}",
            f"{bound.bound_ms:.0f}",
            f"{bound.efficiency:.3f}",
            f"{bound.communication_hidden:.0%}",
        )
    return table
