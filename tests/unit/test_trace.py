"""A predicted timeline as a Chrome trace and as a picture."""

import json
from collections import defaultdict

import pytest

from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.model import Contention
from megatron.oases.cost.system import System
from megatron.oases.report.trace import LANES, chrome_trace
from tests.unit.stand_in_cost import TableCost, shape, workload


@pytest.fixture(scope="module")
def predictions():
    cost = TableCost(
        collective_ms_per_kib=9.0,
        data_ms_per_kib=0.2,
        send_ms=2.0,
        optimizer_ms_per_parameter=1e-3,
        between=Contention(compute=1.2, communication=1.1),
    )
    trained = workload(
        shape(layers=4), pipeline=2, micro_batches=3, data=2, recompute="full", distributed_optimizer=True
    )
    systems = {"megatron": System(schedule="vanilla"), "oases": System()}
    return {name: Simulator(cost).predict(trained, system, record=True) for name, system in systems.items()}


@pytest.fixture(scope="module")
def events(predictions):
    return json.loads(json.dumps(chrome_trace(predictions)))["traceEvents"]


def test_processes_are_stages_and_threads_are_lanes(events):
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "megatron, stage 0", 1: "megatron, stage 1", 2: "oases, stage 0", 3: "oases, stage 1"}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == set(LANES)


def test_what_runs_on_a_lane_does_not_overlap(events):
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) >= 4 * 3
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert start >= end - 1e-6


def test_operations_say_what_they_are(events):
    (event,) = [each for each in events if each["name"] == "reduce(1,1)" and each["pid"] == 2][:1]
    assert event["cat"] == "reduce"
    assert event["args"] == {"micro_batch": 0, "sub_batch": 1, "degree": 2, "role": "attention", "bytes": 1024}
    assert event["dur"] >= 9.0 * 1e3


def test_each_micro_batch_runs_everything(events):
    ran = defaultdict(set)
    for event in events:
        if event["ph"] == "X" and event["pid"] == 3 and event["name"].startswith("forward("):
            ran[event["name"]].add(event["args"]["micro_batch"])
    assert ran and all(micro_batches == {0, 1, 2} for micro_batches in ran.values())


def test_memory_is_a_counter_that_reaches_the_peak(events, predictions):
    stage = predictions["oases"].stages[0]
    shown = [event["args"]["GiB"] for event in events if event["ph"] == "C" and event["pid"] == 2]
    assert max(shown) == pytest.approx(stage.peak_bytes / 2**30)
    assert min(shown) >= stage.static.total_bytes / 2**30


def test_a_picture(predictions, tmp_path):
    pytest.importorskip("matplotlib")
    from megatron.oases.report.timeline import draw_timeline

    draw_timeline(predictions, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
