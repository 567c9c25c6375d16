"""The reproduced tables, for the terminal, as files and as a bar chart."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from megatron.oases.report.measured import ABLATION, COMPARED, MeasuredModel, scaled_down
from megatron.oases.report.paper import BASELINES, CLUSTERS, SYSTEMS, Assumptions, Reproduction, Row

_FIGURE_INCHES = (12, 7)


def describe(assumptions: Assumptions) -> str:
    """In one line."""
    return (
        f"{assumptions.devices} devices; TP: the smallest power of two from {assumptions.least_tensor} on at which all systems "
        f"fit into memory, the rest data-parallel; micro-batch {assumptions.micro_batch}, {assumptions.micro_batches} of them an "
        f"iteration on each replica; full recomputation; products in {assumptions.products.upper()}"
    )


def model_name(model: Sequence[int]) -> str:
    """As the launch scripts have it: `hidden size x layers`."""
    return f"{model[0]}x{model[1]}"


def cluster_table(reproduction: Reproduction, cluster: str) -> Table:
    """Ours, the paper's, and the difference: a row a model."""
    rows = [row for row in reproduction.rows if row.cluster == cluster]
    table = Table(
        title=f"Throughput relative to Megatron-LM, 32 x RTX 3090, {CLUSTERS[cluster]}: simulated / paper (difference)",
        title_justify="left",
        caption="Error: mean absolute difference of a row, Megatron-LM apart. Order: Kendall's tau of the five systems. "
        f"Assumed: {describe(reproduction.assumptions)}.",
        caption_justify="left",
    )
    table.add_column("H x L", no_wrap=True)
    table.add_column("TP x DP", no_wrap=True)
    for system in SYSTEMS[1:]:
        table.add_column(system, justify="right", no_wrap=True)
    for heading in ("error", "order", "degrees\nof oases"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for system in SYSTEMS[1:]:
            ours, papers = row.speedups[system], row.paper[system]
            cells.append(f"{ours:.2f} / {papers:.2f} ({ours - papers:+.2f})")
        table.add_row(model_name(row.model), f"{row.tensor} x {row.data}", *cells, f"{row.error:.2f}", f"{row.rank_agreement:.2f}", row.degrees)
    return table


def summary_table(reproductions: Sequence[Reproduction]) -> Table:
    """How the answer moves: a row an assumption."""
    table = Table(
        title="Under other assumptions",
        title_justify="left",
        caption="Error: mean absolute difference from the paper, over all cells but Megatron-LM's, and over those of Oases. Best "
        "baseline: the paper's or within 0.05 of it.",
        caption_justify="left",
    )
    table.add_column("assumption", no_wrap=True)
    for heading in ("error", "error\nof oases", "oases\nfastest", "best\nbaseline", "oases,\nfrom … to"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in reproductions:
        ours, count = [row.speedups["oases"] for row in each.rows], len(each.rows)
        table.add_row(
            each.assumptions.name,
            f"{each.error:.3f}",
            f"{each.oases_error:.3f}",
            f"{each.oases_fastest} of {count}",
            f"{each.best_baselines_agree} of {count}",
            f"{min(ours):.2f} … {max(ours):.2f}",
        )
    return table


def measured_table(models: Sequence[MeasuredModel]) -> Table:
    """What ran on the emulated cluster: a row a model."""
    settings = models[0].settings
    table = Table(
        title=f"Throughput relative to Megatron, measured: 2 emulated servers of one device, NIC {settings.nic_gbps:g} Gbit/s",
        title_justify="left",
        caption=f"Medians over {settings.rounds} rounds of {settings.iterations} iterations. Efficiency: the slower half of what "
        "oases computes and communicates, each alone, over the measured time. Loss: largest difference of any run from Megatron's.",
        caption_justify="left",
    )
    for heading in ("H x L", "run as", "megatron\nms"):
        table.add_column(heading, no_wrap=True)
    for system in COMPARED[1:]:
        table.add_column(system, justify="right", no_wrap=True)
    headings = ("oases over the\npaper's fastest", "efficiency\nmegatron, oases", "degrees\nalpa, oases", "loss")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in models:
        table.add_row(
            model_name(each.model),
            model_name(scaled_down(each.model)),
            f"{each.measured_ms('megatron'):.0f}",
            *(f"{each.speedup(system):.2f}" for system in COMPARED[1:]),
            f"{each.over_best_baseline:.2f} ({each.best_baseline})",
            ", ".join(f"{each.efficiency(system):.2f}" for system in ("megatron", "oases")),
            f"{each.degrees['alpa']}, {each.degrees['oases']}",
            f"{each.loss_difference:.0e}",
        )
    return table


def ablation_table(models: Sequence[MeasuredModel]) -> Table:
    """What oases is made of, one by one: a row a model."""
    table = Table(title="Speed-up over Megatron of what oases is made of, measured", title_justify="left")
    table.add_column("H x L", no_wrap=True)
    for name in ABLATION:
        table.add_column(name, justify="right")
    for each in models:
        speedups = (f"{each.speedup(system):.2f}" for system in ABLATION.values())
        table.add_row(model_name(each.model), *speedups)
    return table


def write_csv(path: Path, reproduction: Reproduction) -> None:
    """One line a cell."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("cluster", "hidden_size", "layers", "tp", "dp", "system", "simulated_ms", "simulated", "paper"))
        for row in reproduction.rows:
            for system in SYSTEMS:
                times = (f"{row.times_ms[system]:.1f}", f"{row.speedups[system]:.3f}", f"{row.paper[system]:.2f}")
                writer.writerow((row.cluster, *row.model, row.tensor, row.data, system, *times))


def write_markdown(path: Path, reproduction: Reproduction) -> None:
    """Both tables, simulated / paper."""
    lines = [f"Simulated / paper. {describe(reproduction.assumptions)}.", ""]
    lines += [f"| cluster | H x L | TP x DP | {' | '.join(SYSTEMS)} |", "|---" * (3 + len(SYSTEMS)) + "|"]
    for row in reproduction.rows:
        cells = [f"{row.speedups[system]:.2f} / {row.paper[system]:.2f}" for system in SYSTEMS]
        lines.append(f"| {CLUSTERS[row.cluster]} | {model_name(row.model)} | {row.tensor} x {row.data} | {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


def draw_bars(path: Path, reproduction: Reproduction) -> None:
    """Bars as in the paper's figures, with the paper's values as marks on them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_FIGURE_INCHES, layout="constrained")
    for axes, (cluster, name) in zip(figure.subplots(len(CLUSTERS), 1), CLUSTERS.items(), strict=True):
        rows = [row for row in reproduction.rows if row.cluster == cluster]
        width = 1 / (len(SYSTEMS) + 1)
        for number, system in enumerate(SYSTEMS):
            places = [place + (number - len(BASELINES) / 2) * width for place in range(len(rows))]
            axes.bar(places, [row.speedups[system] for row in rows], width, label=system)
            papers = [row.paper[system] for row in rows]
            axes.plot(places, papers, "k_", markersize=9, label="the paper's" if system == SYSTEMS[-1] else None)
        axes.set_xticks(range(len(rows)), [model_name(row.model) for row in rows])
        axes.set_title(f"32 x RTX 3090, {name}, simulated")
        axes.set_ylabel("throughput / Megatron-LM's")
        axes.legend(ncols=len(SYSTEMS) + 1, fontsize="small")
    figure.savefig(path)
