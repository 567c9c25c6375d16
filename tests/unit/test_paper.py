"""The reproduced tables: the paper's figures, what is said of a row, and one row simulated."""

import csv
from pathlib import Path

import pytest
from rich.console import Console

from megatron.oases.cost.prediction import FlagParser
from megatron.oases.errors import UsageError
from megatron.oases.report.paper import (
    ASSUMED,
    CLUSTERS,
    MODELS,
    PAPER,
    SYSTEMS,
    Assumptions,
    Reproduction,
    Row,
    rows_of,
    simulate_row,
)
from megatron.oases.report.paper_tables import cluster_table, draw_bars, summary_table, write_csv, write_markdown

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "oases_paper_speedups.csv"


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the paper's figures as a file")
def test_the_papers_figures_are_the_published_ones():
    values = [float(value) for table in PAPER.values() for row in table for value in row]
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    published = [float(value) for row in rows for value in row.values() if value.replace(".", "").isdigit() and "." in value]
    assert len(values) == len(CLUSTERS) * len(MODELS) * len(SYSTEMS)
    assert sorted(published) == sorted(values)


def _row(cluster="rtx3090x4", model=MODELS[1], **times_ms) -> Row:
    times_ms = {"megatron": 195.0, "alpa": 176.0, "wang": 145.0, "merak": 153.0, "oases": 100.0} | times_ms
    return Row(cluster=cluster, model=model, devices=32, tensor=4, times_ms=times_ms, degrees="4x24")


def test_what_is_said_of_a_row():
    row = _row()
    assert row.paper == {"megatron": 1.0, "alpa": 1.11, "wang": 1.34, "merak": 1.27, "oases": 1.95}
    assert row.speedups["oases"] == 1.95
    assert row.error < 0.005 and row.rank_agreement == pytest.approx(1)
    assert (row.best_baseline, row.best_baseline_agrees, row.oases_is_fastest) == ("wang", True, True)
    other = _row(merak=140.0, oases=150.0)  # merak 1.39, wang 1.34: within 0.05; oases 1.30
    assert (other.best_baseline, other.best_baseline_agrees, other.oases_is_fastest) == ("merak", True, False)
    assert not _row(alpa=120.0).best_baseline_agrees
    assert _row(alpa=120.0).rank_agreement < 1
    whole = Reproduction(assumptions=ASSUMED, rows=[row, other])
    assert (whole.oases_fastest, whole.best_baselines_agree) == (1, 2)
    assert whole.oases_error == pytest.approx(0.325)
    assert whole.error == pytest.approx((row.error + other.error) / 2)


def test_every_row_has_the_same_rule():
    tasks = rows_of(ASSUMED)
    assert len(set(tasks)) == len(CLUSTERS) * len(MODELS)
    assert {assumptions for _, _, assumptions in tasks} == {ASSUMED}
    flags = ASSUMED.flags((2048, 24), tensor=4)
    assert flags[flags.index("--global-batch-size") + 1] == str(8 * 4 * 32 // 4)


def test_files_and_tables(tmp_path):
    rows = [_row(cluster, model) for cluster in CLUSTERS for model in MODELS]
    reproduction = Reproduction(assumptions=ASSUMED, rows=rows)
    write_csv(tmp_path / "speedups.csv", reproduction)
    with (tmp_path / "speedups.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(rows) * len(SYSTEMS)
    assert float(cells[-1]["simulated"]) == 1.95 and float(cells[-1]["paper"]) == PAPER["rtx3090x4"][-1][-1]
    write_markdown(tmp_path / "speedups.md", reproduction)
    assert (tmp_path / "speedups.md").read_text().count("1.95 / ") == len(rows)
    draw_bars(tmp_path / "speedups.png", reproduction)
    assert (tmp_path / "speedups.png").stat().st_size > 10_000
    console = Console(width=200)
    with console.capture() as capture:
        console.print(cluster_table(reproduction, "rtx3090x4"), summary_table([reproduction]))
    assert "1.95 / 1.95 (+0.00)" in capture.get() and "14 of 14" in capture.get()


def test_a_row_is_simulated_at_the_smallest_degree_that_fits():
    parser = FlagParser()
    row = simulate_row("rtx3090x4", (12288, 4), ASSUMED, parser)
    assert row.tensor == 8, "a copy of 7.9e9 parameters takes 126 GB for training, a device has 24 GiB"
    assert row.oases_is_fastest and set(row.times_ms) == set(SYSTEMS)
    huge = Assumptions(name="huge", micro_batch=512)
    with pytest.raises(UsageError, match="hidden size 12288, 4 layers: 'huge' fits at no TP degree"):
        simulate_row("rtx3090x4", (12288, 4), huge, parser)
