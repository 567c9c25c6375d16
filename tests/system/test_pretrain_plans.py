"""Checkpoints outlive a plan: saved under one, loaded under another, or by plain Megatron at any degree, and back."""

from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.system.small_gpt import MOCK_DATA, SMALL, losses

_SAVED, _LAST = 3, 5
# Gated MLPs and grouped queries are cut in the most particular way. The vocabulary is padded alike for every degree.
_FLAGS = [
    "pretrain_gpt.py", *SMALL, *MOCK_DATA, "--num-layers", "4", "--micro-batch-size", "8", "--global-batch-size", "8",
    "--train-iters", str(_LAST), "--lr-decay-style", "constant", "--eval-iters", "0", "--eval-interval", "1000",
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--group-query-attention", "--num-query-groups", "4", "--untie-embeddings-and-output-weights",
    "--make-vocab-size-divisible-by", "64", "--hidden-dropout", "0", "--attention-dropout", "0",
]  # fmt: skip
_PLAN = "--tensor-model-parallel-size 4 --oases-schedule oases --oases-degrees 4/2,1/4,2/1,4"
_OTHER_PLAN = "--tensor-model-parallel-size 4 --oases-schedule vanilla --oases-degrees 2,4,1/2,4"
_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def _train(flags: str, *, ranks: int, report: Path) -> dict[int, float]:
    finished = torchrun([*_FLAGS, *flags.split(), "--oases-report", str(report)], ranks=ranks)
    assert finished.code == 0, finished.tail
    return losses(report)


def _same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found == pytest.approx({iteration: expected[iteration] for iteration in found}, rel=2e-6)


def test_with_megatrons_optimizer(tmp_path):
    saved, plain = tmp_path / "saved", tmp_path / "plain"
    through = _train(f"{_PLAN} --save {saved} --save-interval {_SAVED}", ranks=4, report=tmp_path / "through.json")
    assert through[_SAVED] - through[_LAST] > 1e-3, "nothing was learnt, the comparison would prove nothing"
    for degree, save in ((1, ""), (2, f" --save {plain} --save-interval {_SAVED + 1}")):
        load = f"--tensor-model-parallel-size {degree} --load {saved} --ckpt-step {_SAVED}{save}"
        found = _train(load, ranks=degree, report=tmp_path / f"{degree}.json")
        assert list(found) == [4, 5]
        _same(found, through)
    found = _train(
        f"{_OTHER_PLAN} --load {plain} --ckpt-step {_SAVED + 1}", ranks=4, report=tmp_path / "other.json"
    )
    assert list(found) == [5]
    _same(found, through)


def test_with_the_distributed_optimizer(tmp_path):
    saved = tmp_path / "saved"
    half = "--tensor-model-parallel-size 2 --oases-schedule oases --oases-degrees 2/1,1,2,1/2"
    through = _train(
        f"{half} {_OPTIMIZER} --micro-batch-size 4 --overlap-grad-reduce --overlap-param-gather "
        f"--save {saved} --save-interval {_SAVED}",
        ranks=4,
        report=tmp_path / "through.json",
    )
    found = _train(
        f"{_PLAN} {_OPTIMIZER} --load {saved} --ckpt-step {_SAVED}", ranks=4, report=tmp_path / "other.json"
    )
    assert list(found) == [4, 5]
    _same(found, through)
