"""Each feature that the schedule does not run with is refused by its flag, and by no other."""

import re

import pytest

from megatron.oases.arguments import OasesConfig
from megatron.oases.errors import UsageError
from megatron.oases.support import UNSUPPORTED, UNSUPPORTED_BY_SCRIPT, check_only, check_schedule, check_script
from tests.unit.megatron_parser import shared_parser

# Another flag without which the feature is none.
_WITH = {
    "--recompute-num-layers": ["--recompute-method", "uniform"],
    "--recompute-modules": ["--recompute-granularity", "selective"],
    "--te-rng-tracker": ["--hidden-dropout", "0.1"],
}
_PLAIN = ["--micro-batch-size", "4", "--transformer-impl", "local", "--tensor-model-parallel-size", "2"]
# A value that asks for the feature; switches need none.
_VALUES = {
    "--num-experts": "4",
    "--expert-model-parallel-size": "2",
    "--context-parallel-size": "2",
    "--tensor-parallel-num-weight-shards": "4",
    "--fp8-format": "hybrid",
    "--fp4-format": "e2m1",
    "--cuda-graph-impl": "local",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-virtual-stages-per-pipeline-rank": "2",
    "--pipeline-model-parallel-layout": "Et|tL",
    "--mtp-num-layers": "1",
    "--experimental-attention-variant": "dsa",
    "--spec": "a.module",
    "--heterogeneous-layers-config-path": "layers.json",
    "--heterogeneous-layers-config-encoded-json": "{}",
    "--transformer-impl": "transformer_engine",
    "--optimizer": "muon",
    "--num-distributed-optimizer-instances": "2",
    "--cpu-offloading-num-layers": "1",
    "--mlp-chunks-for-training": "2",
    "--recompute-num-layers": "2",
    "--recompute-modules": "layernorm",
    "--save-activations-interval": "1",
    "--save-dgrads-interval": "1",
    "--hybrid-layer-pattern": "M*",
    "--hybrid-override-pattern": "M*",
    "--dataloader-type": "external",
    "--rampup-batch-size": "4 4 8",
}


def _parse(*argv: str):
    return shared_parser().parse_args([*_PLAIN, *argv])


def _oases(args) -> OasesConfig:
    return OasesConfig.from_args(args, device="cpu")


@pytest.mark.parametrize("entry", UNSUPPORTED, ids=lambda entry: entry.flag)
def test_refused_by_its_flag(entry):
    argv = [entry.flag] + ([_VALUES[entry.flag]] if entry.flag in _VALUES else []) + _WITH.get(entry.flag, [])
    args = _parse("--oases-schedule", "oases", *argv)
    assert [other.flag for other in UNSUPPORTED if other.is_used(args)] == [entry.flag]
    with pytest.raises(UsageError, match=f"^{entry.flag}.*: --oases-schedule oases does not run with {re.escape(entry.feature)}"):
        check_schedule(args, _oases(args))
    # Vanilla Megatron has it.
    args = _parse(*argv)
    check_schedule(args, _oases(args))


@pytest.mark.parametrize("entry", UNSUPPORTED_BY_SCRIPT, ids=lambda entry: entry.flag)
def test_not_for_this_script(entry):
    args = _parse(entry.flag, *_VALUES.get(entry.flag, "").split())
    with pytest.raises(UsageError, match=f"^{entry.flag}: pretrain_gpt.py does not support {re.escape(entry.feature)}"):
        check_script(args)
    check_script(_parse())


def test_what_the_schedule_runs_with_passes():
    args = _parse(
        "--oases-schedule", "oases", "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1", "--use-distributed-optimizer", "--bf16", "--swiglu", "--normalization",
        "RMSNorm", "--group-query-attention", "--num-query-groups", "2", "--optimizer", "sgd",
        "--tensor-parallel-num-weight-shards", "2",
    )  # fmt: skip
    check_schedule(args, _oases(args))


def test_micro_batch_shows_the_arithmetic():
    args = _parse("--oases-schedule", "oases", "--oases-sub-batches", "5")
    arithmetic = "--micro-batch-size 4 is less than --oases-sub-batches 5: use at most 4"
    with pytest.raises(UsageError, match=arithmetic):
        check_schedule(args, _oases(args))


@pytest.mark.parametrize(
    "only, argv, message",
    [
        ("compute", ["--tensor-model-parallel-size", "1"], "--oases-only compute with --tensor-model-parallel-size 1"),
        ("compute", ["--save", "there"], "--oases-only compute with --save there: "),
        ("compute", ["--tp-comm-overlap"], "--oases-only compute with --tp-comm-overlap: "),
        ("communication", ["--step-batch-size-schedule", "0:4 1K:8"], "--step-batch-size-schedule changes them"),
    ],
)
def test_one_half_alone_refuses_what_has_no_meaning_then(only, argv, message):
    argv = [*argv, "--oases-report", "report.json"]
    args = _parse("--oases-only", only, *argv)
    with pytest.raises(UsageError, match=message):
        check_only(args, _oases(args))
    args = _parse(*argv)
    check_only(args, _oases(args))
    args = _parse("--oases-only", only, "--oases-report", "report.json")
    check_only(args, _oases(args))


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--seq-length 2 --oases-sub-batches 3", "--seq-length 2 is less than --oases-sub-batches 3"),
        ("--sequence-parallel", "--oases-split sequence does not run with --sequence-parallel"),
        ("--recompute-granularity selective", "--oases-split sequence does not run with --recompute-granularity sel"),
    ],
)
def test_split_along_the_sequence(argv, message):
    # One sample is enough.
    args = _parse("--oases-schedule", "oases", "--oases-split", "sequence", "--micro-batch-size", "1")
    check_schedule(args, _oases(args))
    args = _parse("--oases-schedule", "oases", "--oases-split", "sequence", *argv.split())
    with pytest.raises(UsageError, match=message):
        check_schedule(args, _oases(args))


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--sequence-parallel", "--sequence-parallel: --oases-schedule wang cuts all-reduces into pieces"),
        ("--seq-length 2 --oases-pieces 3", "--seq-length 2 is less than --oases-pieces 3"),
    ],
)
def test_pieces_of_a_gemm(argv, message):
    args = _parse("--oases-schedule", "wang", "--seq-length", "8")
    check_schedule(args, _oases(args))
    args = _parse("--oases-schedule", "wang", *argv.split())
    with pytest.raises(UsageError, match=message):
        check_schedule(args, _oases(args))
