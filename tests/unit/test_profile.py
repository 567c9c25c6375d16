"""The profile file, and the cost model that reads it."""

import dataclasses
import json
import math
from importlib import metadata

import pytest

from megatron.oases.cost.fits import fit_line, held_out_errors, piecewise_linear, piecewise_log
from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.options import options_of
from megatron.oases.cost.profile import ProfileCost, load_profile_cost
from megatron.oases.cost.profile_file import Optimizer, Overhead, read_profile, write_profile
from megatron.oases.errors import UsageError
from megatron.oases.schedule import Kind, Part, Role
from tests.unit.megatron_parser import shared_parser
from tests.unit.profiles import (
    GBPS,
    GROUP,
    LATENCY_MS,
    MODEL,
    OPTIONS,
    cell,
    collective_ms,
    operation_ms,
    profile,
    with_operations,
    workload,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, profile())
    return path


def _edited(path, edit) -> str:
    """The message with which the file is refused after `edit` has changed its JSON."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError) as refused:
        read_profile(path)
    message = str(refused.value)
    assert str(path) in message and "\n" not in message
    return message


def test_round_trip(file):
    assert read_profile(file) == profile()
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"], "something is left beside the file"


def test_not_a_file_and_not_json(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_profile(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_profile(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match=r"must hold an object, not \[\]"):
        read_profile(tmp_path / "list.json")
    (tmp_path / "twice.json").write_text('{"version": 1, "version": 2}')
    with pytest.raises(UsageError, match="is not JSON: key version is given twice"):
        read_profile(tmp_path / "twice.json")


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda d: d.update(version=1), "version is 1; this tool reads version 2"),
        (lambda d: d.pop("version"), "version is null"),
        (lambda d: d.pop("contention"), "contention is missing"),
        (lambda d: d.update(extra=1), "extra is unknown"),
        (lambda d: d["operations"][0].update(median_ms="3"), "operations[0]: median_ms must be a number, not '3'"),
        (lambda d: d["operations"][0].update(samples=1.5), "operations[0]: samples must be a whole number, not 1.5"),
        (lambda d: d["operations"][0].update(kept=1), "kept must be true or false, not 1"),
        (lambda d: d["operations"][0].update(median_ms=10**400), "median_ms must be a finite number, not a number of 1329 bits"),
        (lambda d: d["operations"][0].update(samples=10**400), "samples must fit into 64 bits, not a number of 1329"),
        (lambda d: d["operations"].append(d["operations"][0]), "operations: forward of mlp, degree 1, recomputed, 1 s"),
        (lambda d: d["collectives"].append(d["collectives"][1]), "all_to_all of 2 ranks, 1 apart stands there twice"),
        (lambda d: d["contention"].append(d["contention"][0]), "contention: 2 ranks, 1 apart stands"),
        (lambda d: d["collectives"][0].update(stride=0), "collectives[0]: a group of"),
        (lambda d: d["operations"][0].update(samples=True), "samples must be a whole number, not True"),
        (lambda d: d["operations"][0].update(kind="fly"), "operations[0]: kind is 'fly', must be one of forward"),
        (lambda d: d["operations"][0].update(median_ms=math.nan), "[0]: median_ms must be a finite number, not nan"),
        (lambda d: d["operations"][0].update(median_ms=-1), "median_ms is -1.0, must not be negative"),
        (lambda d: d["operations"][0].update(median_ms=None), "median_ms is null, and missing gives no reason"),
        (lambda d: d["operations"][0].update(missing="why"), "is marked as missing (why), but has a value"),
        (lambda d: d["fingerprint"]["model"].pop("heads"), "fingerprint: model: heads is missing"),
        (lambda d: d["collectives"][0]["points"].reverse(), "the sizes of all_reduce do not increase"),
        (lambda d: d["collectives"][0].update(fit=None), "needs two points and a fit"),
        (lambda d: d["contention"][0].update(compute=0.5), "contention below 1"),
        (lambda d: d["overhead"].update(fixed_ms=-1), "overhead: fixed_ms is -1.0, must not be negative"),
        (lambda d: d["operations"][0].update(passes_apart=-0.1), "passes_apart is -0.1, must not be negative"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_key(file, edit, said):
    assert said in _edited(file, edit)


def test_changed_units_are_refused(file):
    def in_microseconds(data):
        for entry in data["operations"]:
            entry["median_us"] = 1000 * entry.pop("median_ms")

    assert "operations[0]: median_ms is missing" in _edited(file, in_microseconds)


def _forward_ms(cost: ProfileCost, samples: int, degree: int = 2, *, recomputed: bool = True) -> float:
    return cost.compute_ms(Kind.FORWARD, Part(Role.MLP, recomputed=recomputed), degree=degree, samples=samples)


def test_measured_cells_are_given_as_they_are():
    cost = ProfileCost(profile())
    for degree in (1, 2):
        for samples in (1, 2, 4):
            assert _forward_ms(cost, samples, degree) == operation_ms(degree, samples, kept=False)
    assert not cost.announcements


def test_kept_graphs_have_times_of_their_own():
    assert _forward_ms(ProfileCost(profile()), 4, recomputed=False) == operation_ms(2, 4, kept=True)


def test_the_other_way_is_taken_where_only_that_was_measured():
    only_recomputed = with_operations(cell(1), cell(2))
    assert _forward_ms(ProfileCost(only_recomputed), 2, recomputed=False) == operation_ms(2, 2, kept=False)


def test_between_cells_and_a_little_beyond():
    cost = ProfileCost(with_operations(cell(1, median_ms=1.0), cell(2, median_ms=3.0), cell(4, median_ms=4.0)))
    assert _forward_ms(cost, 3) == pytest.approx(3.5)
    assert not cost.announcements
    assert _forward_ms(cost, 8) == pytest.approx(6.0)  # the last slope
    assert "8 samples are extrapolated from 2 and 4" in cost.announcements.pop()


@pytest.mark.parametrize(
    "cells, samples, degree, said",
    [
        ((cell(2), cell(4)), 9, 2, "9 samples; measured: 2, 4; at most 2 x 4 are extrapolated"),
        ((cell(2), cell(4)), 1, 2, "1 samples; measured: 2, 4; nothing is extrapolated to fewer"),
        ((cell(2),), 4, 2, "4 samples; measured: 2"),
        ((cell(2), cell(4)), 2, 4, "degree 4 was not measured; there are 2"),
        ((cell(2, median_ms=None, spread_ms=None, missing="out of memory"),), 2, 2, "out of memory"),
    ],
)
def test_what_was_not_measured_is_named_with_the_command(cells, samples, degree, said):
    with pytest.raises(UsageError) as refused:
        _forward_ms(ProfileCost(with_operations(*cells), file="here.json"), samples, degree)
    message = str(refused.value)
    assert said in message
    assert message.startswith(f"here.json: forward of mlp at TP degree {degree}")
    assert "oases_profiler.py" in message and "--num-layers 4" in message


def test_a_missing_cell_is_bridged_by_its_neighbours_only():
    cells = (cell(1, median_ms=1.0), cell(2, median_ms=None, spread_ms=None, missing="why"), cell(4, median_ms=4.0))
    assert _forward_ms(ProfileCost(with_operations(*cells)), 2) == pytest.approx(2.0)


def test_collectives():
    cost = ProfileCost(profile())

    def all_reduce_ms(size: int, group: Group = GROUP) -> float:
        return cost.collective_ms(Collective.ALL_REDUCE, group, size)

    assert all_reduce_ms(4096) == collective_ms(4096)
    assert all_reduce_ms(3 * 4096) == pytest.approx(collective_ms(3 * 4096), rel=0.05)
    assert all_reduce_ms(16) == pytest.approx(collective_ms(16))
    assert all_reduce_ms(0) == 0.0
    assert all_reduce_ms(2**20, Group(1)) == 0.0
    assert not cost.announcements
    assert all_reduce_ms(2**30) == pytest.approx(collective_ms(2**30))
    assert "larger ones follow the fitted bandwidth" in cost.announcements.pop()
    times = [all_reduce_ms(size) for size in range(1, 2**22, 9999)]
    assert times == sorted(times)


def test_collectives_that_are_missing():
    cost = ProfileCost(profile())
    with pytest.raises(UsageError, match="all_to_all of 2 ranks, 1 apart: gloo: cannot do it"):
        cost.collective_ms(Collective.ALL_TO_ALL, GROUP, 4096)
    with pytest.raises(UsageError, match="all_reduce of 4 ranks, 2 apart: was not measured"):
        cost.collective_ms(Collective.ALL_REDUCE, Group(4, 2), 4096)


def test_the_rest_of_an_iteration():
    cost = ProfileCost(profile())
    assert cost.optimizer_ms(2 * 10**6) == pytest.approx(1.0 + 10.0)
    assert cost.iteration_overhead_ms(5) == 3.0 + 5 * 2.0
    assert cost.contention(GROUP) == Contention(compute=1.2, communication=1.1)
    assert cost.contention(Group(1)) == Contention()
    with pytest.raises(UsageError, match="contention of computation and 4 ranks, 1 apart: was not measured"):
        cost.contention(Group(4))


def test_what_did_not_fit_into_memory_is_refused_with_the_reason():
    reason = "out of memory: 5 GiB"
    nothing = dict.fromkeys(("fixed_ms", "ns_per_parameter", "residual"))
    without = profile(
        optimizer=Optimizer(points=(), **nothing, missing=reason),
        overhead=Overhead(fixed_ms=None, per_micro_batch_ms=None, missing=reason),
    )
    with pytest.raises(UsageError, match=f"the optimizer: {reason}"):
        ProfileCost(without).optimizer_ms(1)
    with pytest.raises(UsageError, match=f"the rest of an iteration: {reason}"):
        ProfileCost(without).iteration_overhead_ms(1)


def test_megatron_computes_by_its_own_factor():
    cost = ProfileCost(profile())
    megatron = cost.for_megatron(kept=False)
    assert _forward_ms(megatron, 4) == 1.25 * _forward_ms(cost, 4)
    assert megatron.collective_ms(Collective.ALL_REDUCE, GROUP, 4096) == collective_ms(4096)
    with pytest.raises(UsageError, match="out of memory"):
        cost.for_megatron(kept=True)


def test_a_profile_of_this_workload_is_loaded(file):
    cost = load_profile_cost(file, workload(micro_batches=8, pipeline=2), OPTIONS)
    assert _forward_ms(cost, 4) == operation_ms(2, 4, kept=False)
    torch = next(line for line in cost.announcements if "torch" in line)
    assert torch == f"{file} was taken with torch 1.0; here is {metadata.version('torch')}"


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(model=dataclasses.replace(MODEL, hidden_size=128)), "another model: hidden_size is 64, here 128"),
        (dict(tensor=4), "has no TP degree 4, only 1, 2"),
        (dict(sequence_parallel=True), "without --sequence-parallel"),
        (dict(hidden_dropout=True), "without --hidden-dropout"),
        (dict(attention_dropout=True), "without --attention-dropout"),
    ],
)
def test_a_profile_of_something_else_is_refused(file, changes, said):
    with pytest.raises(UsageError) as refused:
        load_profile_cost(file, workload(**changes), OPTIONS)
    assert said in str(refused.value) and str(file) in str(refused.value)


def test_a_vocabulary_padded_for_another_degree_is_the_same_one(file):
    padded = dataclasses.replace(MODEL, padded_vocabulary=MODEL.padded_vocabulary + 1)
    load_profile_cost(file, workload(model=padded, tensor=1), OPTIONS)
    with pytest.raises(UsageError, match="padded_vocabulary is"):
        load_profile_cost(file, workload(model=padded), OPTIONS)


@pytest.mark.parametrize(
    "options, said",
    [
        ({**OPTIONS, "qk_layernorm": "True"}, "other options: qk_layernorm is False, here True: profile again"),
        ({"optimizer": "adam"}, "qk_layernorm is False, here None"),
        ({**OPTIONS, "swiglu": "True"}, "swiglu is None, here True"),
    ],
)
def test_a_profile_with_other_options_is_refused(file, options, said):
    with pytest.raises(UsageError) as refused:
        load_profile_cost(file, workload(), options)
    assert said in str(refused.value) and str(file) in str(refused.value)


OPTION_FLAGS = """--squared-relu | --swiglu | --position-embedding-type rope | --qk-layernorm | --bf16 | --fp16 |
    --optimizer sgd | --bf16 --grad-reduce-in-bf16 | --clip-grad 0 | --recompute-granularity selective | --window-size 8,0 |
    --fp32-residual-connection --bf16 | --use-precision-aware-optimizer | --use-distributed-optimizer |
    --normalization RMSNorm | --no-bias-gelu-fusion | --attention-softmax-in-fp32 | --rotary-percent 0.5 """


@pytest.mark.parametrize("flags", [flags.split() for flags in OPTION_FLAGS.split("|")], ids=" ".join)
def test_whatever_changes_kernels_is_an_option(flags):
    def options(*more: str) -> dict[str, str]:
        args = shared_parser().parse_args([*more])
        dtype = {(True, False): "half", (False, True): "bfloat16"}.get((args.fp16, args.bf16), "float")
        args.params_dtype, args.accumulate_allreduce_grads_in_fp32 = dtype, args.bf16 and not args.grad_reduce_in_bf16
        return options_of(args)

    assert options() == options()
    assert options(*flags) != options(*(flag for flag in flags if flag == "--bf16" and len(flags) > 1))


def test_more_layers_than_profiled_are_no_other_model(file):
    load_profile_cost(file, workload(model=dataclasses.replace(MODEL, layers=96)), OPTIONS)


def test_fit_recovers_latency_and_bandwidth():
    sizes = [4096 * 2**i for i in range(12)]
    line = fit_line(sizes, [collective_ms(size) for size in sizes])
    assert line.fixed == pytest.approx(LATENCY_MS)
    assert 8e-6 / line.slope == pytest.approx(GBPS)
    assert line.residual == pytest.approx(0.0, abs=1e-9)


def test_fit_is_of_relative_error():
    """The error of the largest point alone would hide the latency of the small ones."""
    sizes = [4096 * 2**i for i in range(12)]
    times = [collective_ms(size) for size in sizes]
    times[-1] *= 1.2
    assert fit_line(sizes, times).fixed == pytest.approx(LATENCY_MS, rel=0.1)


def test_fit_is_never_negative():
    falling = fit_line([1, 2, 3], [3.0, 2.0, 1.0])
    assert falling.slope == 0 and falling.fixed > 0
    steep = fit_line([1, 2, 3], [0.1, 2.0, 5.0])
    assert steep.fixed == 0 and steep.slope > 0
    one = fit_line([2, 2], [4.0, 4.0])
    assert (one.fixed, one.slope, one.residual) == (0.0, 2.0, 0.0)
    with pytest.raises(ValueError, match="a line through no point"):
        fit_line([], [])


def test_held_out_errors():
    assert held_out_errors([1, 2, 4], [3.0, 5.0, 9.0], piecewise_linear) == [pytest.approx(0.0)]
    assert held_out_errors([1, 2, 3], [1.0, 4.0, 3.0], piecewise_linear) == [pytest.approx(0.5)]
    assert held_out_errors([1, 10, 100], [1.0, 10.0, 100.0], piecewise_log) == [pytest.approx(0.0)]
    assert held_out_errors([1, 2], [1.0, 2.0], piecewise_linear) == []
