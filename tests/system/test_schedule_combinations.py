"""The schedule with everything that is combined with it: losses equal vanilla Megatron's over several optimizer steps."""

import json

import pytest

from tests.launch import torchrun
from tests.system.small_gpt import MOCK_DATA, SMALL, losses

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
# ranks, flags, largest relative difference of a loss
COMBINATIONS = {
    "gradient accumulation, uneven sub-batches": (
        2, f"--micro-batch-size 3 --global-batch-size 9 {_FULL}", 2e-6
    ),
    "sequence parallelism": (2, f"--sequence-parallel --global-batch-size 8 {_FULL} {_LLAMA}", 2e-6),
    "pipeline": (4, f"--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8 {_FULL}", 2e-6),
    "pipeline, sequence parallelism, recompute block": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 6 --sequence-parallel "
        f"--recompute-granularity full --recompute-method block --recompute-num-layers 1 {_LLAMA}",
        2e-6,
    ),
    "data parallelism, overlaps": (4, f"--global-batch-size 12 {_DISTRIBUTED} {_FULL}", 2e-6),
    "tensor parallelism of four": (4, "--tensor-model-parallel-size 4 --micro-batch-size 4 --global-batch-size 8", 2e-6),
    "bf16, loss masks, per token": (
        2, f"--bf16 --eod-mask-loss --calculate-per-token-loss --global-batch-size 8 {_FULL}", 2e-3
    ),
    "fp16, overflow and recovery": (
        2, f"--fp16 --initial-loss-scale 16777216 --hysteresis 1 --global-batch-size 8 {_FULL} {_LLAMA}", 5e-3
    ),
    "one sample, along the sequence": (
        2, f"--micro-batch-size 1 --global-batch-size 3 --oases-split sequence {_FULL} {_LLAMA}", 2e-6
    ),
    "sdpa": (2, f"--oases-core-attention sdpa {_FULL} {_LLAMA}", 2e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINATIONS)
def test_equals_vanilla(tmp_path, name):
    ranks, flags, tolerance = COMBINATIONS[name]
    shared = [
        "pretrain_gpt.py", *SMALL, *MOCK_DATA, "--tensor-model-parallel-size", "2",
        "--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "8", "--eval-interval", "4",
        *flags.split(),
    ]  # fmt: skip
    results = {}
    for schedule in ("vanilla", "oases"):
        report = tmp_path / f"{schedule}.json"
        # What only the schedule reads is refused without it.
        flags_of_it = shared if schedule == "oases" else _without(shared, "--oases-split")
        finished = torchrun(
            [*flags_of_it, "--oases-schedule", schedule, "--oases-report", str(report)], ranks=ranks
        )
        assert finished.code == 0, finished.tail
        results[schedule] = losses(report)
        skipped = [entry["skipped"] for entry in json.loads(report.read_text())["iterations"]]
        assert any(skipped) == ("overflow" in name) and not skipped[-1]
    assert results["vanilla"].keys() == results["oases"].keys() and len(results["oases"]) == 8
    reached = list(results["vanilla"].values())
    assert reached[0] - reached[-1] > 1e-3, f"nothing was learnt, the comparison would prove nothing: {reached}"
    for iteration, loss in results["vanilla"].items():
        assert results["oases"][iteration] == pytest.approx(loss, rel=tolerance), f"iteration {iteration}"


def _without(argv: list[str], flag: str) -> list[str]:
    """The command line without a flag and its value."""
    if flag not in argv:
        return argv
    place = argv.index(flag)
    return argv[:place] + argv[place + 2 :]
