"""A predicted timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

The format is the "Trace Event Format": complete events with `ts` and `dur` in microseconds, counters, and names of
processes and threads. A process is a pipeline stage of one system, a thread one of its lanes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.oases.cost.result import Prediction
from megatron.oases.cost.simulator import Span
from megatron.oases.sizes import GIB

# In the order in which they are shown.
LANES = ("compute", "communication", "data", "pipeline")


def chrome_trace(predictions: Mapping[str, Prediction]) -> dict[str, Any]:
    """The trace of recorded predictions, by system.

    Args:
        predictions: with their timelines.
    """
    events: list[dict[str, Any]] = []
    stages_before = 0
    for system, prediction in predictions.items():
        events += _events(system, prediction, stages_before)
        stages_before += len(prediction.stages)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(system: str, prediction: Prediction, first_process: int) -> Iterator[dict[str, Any]]:
    for number, stage in enumerate(prediction.stages):
        process = first_process + number
        yield _metadata("process_name", process, 0, name=f"{system}, stage {number}")
        yield _metadata("process_sort_index", process, 0, sort_index=process)
        used = {span.lane for span in prediction.timeline if span.stage == number}
        for thread, lane in enumerate(LANES):
            if lane in used:
                yield _metadata("thread_name", process, thread, name=lane)
                yield _metadata("thread_sort_index", process, thread, sort_index=thread)
        for time_ms, size_bytes in stage.memory:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": process,
                "tid": 0,
                "ts": time_ms * 1e3,
                "args": {"GiB": size_bytes / GIB},
            }
    for span in prediction.timeline:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane if span.operation is None else span.operation.kind.value,
            "pid": first_process + span.stage,
            "tid": LANES.index(span.lane),
            "ts": span.start_ms * 1e3,
            "dur": (span.end_ms - span.start_ms) * 1e3,
            "args": _arguments(span, prediction.degree),
        }


def _arguments(span: Span, degree: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if span.operation is not None:
        arguments = {"micro_batch": span.micro_batch, "sub_batch": span.operation.sub_batch, "degree": degree}
    if span.role is not None:
        arguments["role"] = span.role.value
    if span.size_bytes is not None:
        arguments["bytes"] = span.size_bytes
    return arguments


def _metadata(event: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "args": arguments}
