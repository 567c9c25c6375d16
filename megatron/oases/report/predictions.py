"""How predictions look in a terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from megatron.oases.cost.result import Prediction, StagePrediction
from megatron.oases.sizes import GIB



def predictions_table(predictions: Mapping[str, Prediction], *, title: str) -> Table:
    """One row a system; the first is what the others are compared with."""
    table = Table(
        title=escape(title),
        title_justify="left",
        caption="Compute and communication: each alone, of the stage that waits least for others. Exposed: what "
        "communication adds. Peak memory: of the device that needs most.",
        caption_justify="left",
    )
    _columns(
        table,
        (
            "iteration\nms",
            "compute\nms",
            "communi-\ncation, ms",
            "exposed\nms",
            "hidden",
            "tokens/s",
            "speed-up",
            "peak\nGiB",
        ),
    )
    first = next(iter(predictions.values()))
    for name, prediction in predictions.items():
        table.add_row(
            name,
            f"{prediction.iteration_ms:.1f}",
            f"{prediction.compute_ms:.1f}",
            f"{prediction.communication_ms:.1f}",
            f"{prediction.exposed_ms:.1f}",
            "–" if prediction.hidden is None else f"{prediction.hidden:.0%}",
            f"{prediction.tokens_per_s:.0f}",
            f"{first.iteration_ms / prediction.iteration_ms:.3f}",
            f"{prediction.peak_bytes / GIB:.2f}",
        )
    return table


def times_table(predictions: Mapping[str, Prediction]) -> Table:
    """Where the time of one device goes: one row a system and pipeline stage."""
    table = Table(
        title="Time of one device, ms",
        title_justify="left",
        caption="Exposed: what tensor-parallel communication adds. The columns add up to the iteration.",
        caption_justify="left",
    )
    _columns(table, ("compute", "exposed", "pipeline", "data-\nparallel", "optimizer", "rest"))
    for name, stage in _stages(predictions):
        times_ms = (
            stage.compute_ms,
            stage.exposed_ms,
            stage.pipeline_ms,
            stage.data_parallel_ms,
            stage.optimizer_ms,
            stage.overhead_ms,
        )
        table.add_row(name, *(f"{ms:.1f}" for ms in times_ms))
    return table


def memory_table(predictions: Mapping[str, Prediction]) -> Table:
    """What lies in the memory of one device: one row a system and pipeline stage."""
    table = Table(
        title="Memory of one device, GiB",
        title_justify="left",
        caption="Activations: what the peak has beyond the rest.",
        caption_justify="left",
    )
    _columns(table, ("weights", "gradients", "optimizer", "activations", "peak"))
    for name, stage in _stages(predictions):
        static = stage.static
        sizes = (
            static.parameters_bytes,
            static.gradients_bytes,
            static.optimizer_bytes,
            stage.peak_bytes - static.total_bytes,
            stage.peak_bytes,
        )
        table.add_row(name, *(f"{size_bytes / GIB:.3f}" for size_bytes in sizes))
    return table


def _stages(predictions: Mapping[str, Prediction]) -> Iterator[tuple[str, StagePrediction]]:
    for name, prediction in predictions.items():
        for number, stage in enumerate(prediction.stages):
            yield f"{name}, stage {number}" if len(prediction.stages) > 1 else name, stage


def _columns(table: Table, headings: Sequence[str]) -> None:
    table.add_column("system", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
