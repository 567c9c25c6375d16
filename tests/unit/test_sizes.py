"""A size out of range is one line that names its flag."""

import pytest

from megatron.oases.errors import UsageError
from megatron.oases.sizes import check_shards, check_sizes
from tests.unit.megatron_parser import shared_parser

_GOOD = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --train-iters 4"


def _check(argv: str) -> None:
    check_sizes(shared_parser().parse_args([*_GOOD.split(), *argv.split()]))


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--num-layers 0", "--num-layers 0 must be at least 1"),
        ("--num-attention-heads 0", "--num-attention-heads 0 must be at least 1"),
        ("--seq-length -8", "--seq-length -8 must be at least 1"),
        ("--vocab-size -5", "--vocab-size -5 must be at least 1"),
        ("--eval-interval 0", "--eval-interval 0 must be at least 1"),
        ("--hidden-dropout 2", "--hidden-dropout 2.0 is a probability"),
        ("--train-iters 0", "--train-iters is missing"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 must be less than --train-iters 4"),
        (
            "--group-query-attention --num-query-groups 3",
            r"--num-attention-heads 4 is not divisible by --num-query-groups 3: 4 = 1 x 3 \+ 1",
        ),
        (
            "--sequence-parallel --seq-length 33 --tensor-model-parallel-size 2",
            r"--seq-length 33 is not divisible by --tensor-model-parallel-size 2: 33 = 16 x 2 \+ 1",
        ),
    ],
)
def test_refused(argv, message):
    with pytest.raises(UsageError, match=message):
        _check(argv)


@pytest.mark.parametrize("argv", ["", "--lr-warmup-iters 3", "--eval-iters 0", "--seq-length 33", "--train-samples 8"])
def test_accepted(argv):
    _check(argv)


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--num-attention-heads 3", "--num-attention-heads 3 is not divisible by --tensor-model-parallel-size 4"),
        (
            "--ffn-hidden-size 30",
            r"--ffn-hidden-size 30 is not divisible by --tensor-model-parallel-size 4: 30 = 7 x 4 \+ 2",
        ),
        (
            "--num-attention-heads 12 --group-query-attention --num-query-groups 6",
            "--num-query-groups 6 is not divisible by --tensor-model-parallel-size 4",
        ),
        ("--num-attention-heads 12 --group-query-attention --num-query-groups 3", "--num-query-groups 3 is not"),
    ],
)
def test_what_cannot_be_spread_over_the_ranks(argv, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        _check_shards(argv)


def test_several_ranks_may_share_a_query_group():
    _check_shards("--group-query-attention --num-query-groups 2")
    _check_shards("--ffn-hidden-size 32")


def _check_shards(argv: str) -> None:
    flags = [*_GOOD.split(), "--ffn-hidden-size", "16", "--tensor-model-parallel-size", "4", *argv.split()]
    check_shards(shared_parser().parse_args(flags))
