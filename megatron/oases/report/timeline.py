"""A predicted timeline as a picture: lanes over time, coloured by what runs."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.oases.cost.result import Prediction
from megatron.oases.cost.simulator import Span
from megatron.oases.report.trace import LANES
from megatron.oases.schedule import Kind, Role

_COLOURS = {
    "forward": "#4c78a8",
    "recomputation": "#9ecae9",
    "input gradient": "#f58518",
    "weight gradient": "#ffbf79",
    "norms, residuals": "#88d27a",
    "embedding, head, loss": "#b279a2",
    "tensor-parallel communication": "#bab0ac",
    "data-parallel communication": "#79706e",
    "between stages": "#d67195",
    "optimizer": "#54a24b",
}
_BY_LANE = {
    "communication": "tensor-parallel communication",
    "data": "data-parallel communication",
    "pipeline": "between stages",
}
_BY_KIND = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recomputation",
    Kind.REJOIN: "recomputation",
    Kind.RENORM: "recomputation",
    Kind.DGRAD: "input gradient",
    Kind.WGRAD: "weight gradient",
    Kind.ROW_WGRAD: "weight gradient",
}
_LANE_INCHES, _WIDTH_INCHES = 0.45, 16.0
_LABEL_SHARE = 0.009  # of the width of the picture: what a label of a few characters needs
_SMALL_FONT = 6


def draw_timeline(predictions: Mapping[str, Prediction], path: Path) -> None:
    """Writes a picture, one diagram a system, all with the same scale of time.

    Args:
        predictions: by system, with their timelines.
        path: the file; its ending says the format, such as .png or .svg.
    """
    rows = {system: _rows(prediction) for system, prediction in predictions.items()}
    heights = [len(each) for each in rows.values()]
    height_inches = _LANE_INCHES * sum(heights) + 0.9 * len(heights) + 0.8  # titles, and the legend
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest_ms = max(prediction.iteration_ms for prediction in predictions.values())
    used: set[str] = set()
    for axis, (system, prediction) in zip(axes, predictions.items(), strict=True):
        used |= _draw(axis, rows[system], longest_ms)
        axis.set_title(f"{system}: {prediction.iteration_ms:.1f} ms an iteration", loc="left", fontsize=10)
        axis.set_xlim(0, longest_ms)
    axes[-1].set_xlabel("ms")
    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _rows(prediction: Prediction) -> dict[str, list[Span]]:
    """The spans of each lane of each stage that has any, from top to bottom."""
    found: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in prediction.timeline:
        found[span.stage, LANES.index(span.lane)].append(span)
    whole = len(prediction.stages) == 1
    return {
        LANES[lane] if whole else f"stage {stage} {LANES[lane]}": found[stage, lane] for stage, lane in sorted(found)
    }


def _draw(axis: Axes, rows: Mapping[str, list[Span]], longest_ms: float) -> set[str]:
    used = set()
    for row, spans in enumerate(rows.values()):
        by_group: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_group[_group(span)].append(span)
        for group, its_spans in by_group.items():
            bars = [(span.start_ms, span.end_ms - span.start_ms) for span in its_spans]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=_COLOURS[group], edgecolor="white", linewidth=0.3)
        used |= by_group.keys()
        for span in spans:
            width_ms = span.end_ms - span.start_ms
            if span.operation is not None and width_ms >= _LABEL_SHARE * longest_ms:
                middle_ms = (span.start_ms + span.end_ms) / 2
                text = f"{span.operation.place},{span.operation.sub_batch}"
                axis.text(middle_ms, row, text, ha="center", va="center", fontsize=_SMALL_FONT)
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    return used


def _group(span: Span) -> str:
    if span.lane in _BY_LANE:
        return _BY_LANE[span.lane]
    if span.operation is None:
        return "optimizer"
    if span.role in (Role.EMBEDDING, Role.HEAD):
        return "embedding, head, loss"
    return _BY_KIND.get(span.operation.kind, "norms, residuals")
