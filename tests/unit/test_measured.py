"""The systems measured on scaled-down models: what runs, in which order, and what is said of it."""

from dataclasses import replace

import pytest
from rich.console import Console

from megatron.oases.cost.prediction import FlagParser
from megatron.oases.errors import UsageError
from megatron.oases.report import measured
from megatron.oases.report.measured import (
    ABLATION,
    COMPARED,
    Contenders,
    MeasuredModel,
    Settings,
    contenders,
    measure,
    read_measured,
    runs_of,
    write_measured,
)
from megatron.oases.report.paper import MODELS
from megatron.oases.report.paper_tables import ablation_table, measured_table
from megatron.oases.report.runs import Run

SETTINGS = Settings(nic_gbps=0.5, rounds=2, iterations=4)
TIMES_MS = {
    "megatron": 200.0,
    "alpa": 190.0,
    "wang 2": 170.0,
    "wang 4": 180.0,
    "merak": 160.0,
    "domino": 150.0,
    "recomputation": 165.0,
    "oases": 100.0,
}
RUN_OF = {name: (name,) for name in TIMES_MS} | {"wang": ("wang 2", "wang 4"), "uniform": ("oases",)}


def _model(**changes) -> MeasuredModel:
    fields = {
        "model": MODELS[0],
        "settings": SETTINGS,
        "degrees": {"alpa": "1/2x4", "oases": "2x4"},
        "run_of": RUN_OF,
        "iterations_ms": {name: ((ms - 1, ms), (ms, ms + 1)) for name, ms in TIMES_MS.items()},
        "compute_only_ms": 90.0,
        "communication_only_ms": 80.0,
        "loss_difference": 1e-6,
        "seconds": 300.0,
        "about": {"commit": "1234567"},
    }
    return MeasuredModel(**fields | changes)


def test_what_is_said_of_a_model():
    model = _model()
    assert model.measured_ms("wang") == 170 and model.speedup("wang") == pytest.approx(200 / 170)
    assert model.speedup("megatron") == 1 and model.speedup("uniform") == model.speedup("oases") == 2
    assert model.rounds_ms("oases") == [99.5, 100.5]
    assert (model.best_baseline, model.over_best_baseline) == ("merak", 1.6)  # domino is none of the paper's
    assert (model.efficiency("oases"), model.efficiency("megatron")) == (0.9, 0.45)


def test_tables():
    console = Console(width=200)
    with console.capture() as capture:
        console.print(measured_table([_model()]), ablation_table([_model()]))
    text = capture.get()
    for shown in ("1024x24", "128x4", "1.60 (merak)", "0.45, 0.90", "1/2x4, 2x4", "1e-06", *ABLATION):
        assert shown in " ".join(text.split())


def test_the_file_is_read_back_and_wrong_ones_are_refused(tmp_path):
    path = tmp_path / "measured.json"
    assert read_measured(path) == []
    models = [_model(), _model(model=MODELS[1])]
    write_measured(path, models)
    assert read_measured(path) == models
    path.write_text('{"version": 1, "models": [{}]}')
    with pytest.raises(UsageError, match="model is missing"):
        read_measured(path)


def test_systems_alternate_and_of_wang_the_faster_goes_on(monkeypatch):
    ran = []

    def run_once(launcher, *, system, round_number, flags, iterations, on_line, only=None):
        ran.append((system, round_number, only))
        losses = () if only else (7.0, 6.0, 5.0, 4.0 + (system == "merak") * 1e-3)
        own_ms = TIMES_MS[system]
        return Run(
            system=system,
            round_number=round_number,
            iterations_ms=(9e9, 9e9, own_ms, own_ms),
            losses=losses,
            tokens_per_iteration=1,
            only=only,
        )

    monkeypatch.setattr(measured, "run_once", run_once)
    competing = Contenders(flags={name: [] for name in TIMES_MS}, run_of=RUN_OF, degrees={"alpa": "2x4", "oases": "2x4"})
    ended = []
    model = measure(
        MODELS[0],
        SETTINGS,
        competing,
        on_start=lambda name: None,
        on_line=lambda line: None,
        on_end=lambda name, result: ended.append(name),
    )
    names = list(TIMES_MS)
    second = [name for name in reversed(names) if name != "wang 4"]
    assert [name for name, number, only in ran if number == 1 and only is None] == names
    assert [name for name, number, _ in ran if number == 2] == second
    assert [(name, only) for name, _, only in ran if only] == [("oases", "compute"), ("oases", "communication")]
    assert len(ran) == len(ended) == runs_of(competing, SETTINGS)
    assert model.measured_ms("oases") == 100 and model.loss_difference == pytest.approx(1e-3)


def test_contenders_differ_in_nothing_but_the_method(tmp_path):
    competing = contenders(MODELS[1], SETTINGS, FlagParser(), tmp_path)
    systems = {*COMPARED, *ABLATION.values()}
    assert systems <= set(competing.run_of)
    assert {name for system in systems for name in competing.run_of[system]} == set(competing.flags)
    plans = {"--oases-plan"}
    for name, flags in competing.flags.items():
        own = {flag for flag in flags if flag.startswith("--oases")}
        others = {flag for flag in flags if flag.startswith("--")} - own
        # A plan says itself that all blocks are recomputed.
        expected = set() if own == plans else {"--recompute-granularity", "--recompute-method", "--recompute-num-layers"}
        assert others == expected, name
    assert list(tmp_path.glob("2048x24-*.json"))


def test_models_too_narrow_for_the_cluster_do_not_exist():
    for model in MODELS:
        flags = SETTINGS.flags(model)
        heads = int(flags[len(flags) - 1 - flags[::-1].index("--num-attention-heads") + 1])
        assert heads % measured.RANKS == 0
    assert replace(SETTINGS, nic_gbps=1.0).source.name.startswith("cluster emulated")
