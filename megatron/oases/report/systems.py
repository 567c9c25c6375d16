"""What is compared, and on which workload: command lines of pretrain_gpt.py, so that anyone can run them by hand."""

import argparse
import re
import shlex
from collections.abc import Sequence

from megatron.oases.available import Available
from megatron.oases.errors import UsageError

# A system is what it adds to the flags that all of them share.
SYSTEMS: dict[str, tuple[str, ...]] = {
    "megatron": ("--oases-schedule", "vanilla"),
    "wang": ("--oases-schedule", "wang"),
    "merak": ("--oases-schedule", "merak"),
    "domino": ("--oases-schedule", "domino"),
    "oases": ("--oases-schedule", "oases"),
}
COMPARED = ("megatron", "oases")  # unless others are asked for

RECOMPUTE: dict[str, tuple[str, ...]] = {
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    "none": (),
}

# Small enough for two CPU cores, large enough that communication at 0.5 Gbit/s takes as long as computation.
_REFERENCE_WORKLOAD = """
    --num-layers 4 --hidden-size 512 --num-attention-heads 8
    --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 4 --global-batch-size 4
    --tokenizer-type NullTokenizer --vocab-size 1024 --mock-data
    --tensor-model-parallel-size 2
    --hidden-dropout 0 --attention-dropout 0
    --lr 3e-4 --lr-decay-style constant --seed 1234
    --eval-iters 0 --eval-interval 1000000000 --log-interval 1
"""

# What no time depends on: data, checkpoints, logs, learning rate. Files that a training command names need not be here.
_WITHOUT_INFLUENCE = re.compile(
    "--((train-|valid-|test-)?data-path|data-args-path|data-cache-path|mock-data|split|train-iters|train-samples|"
    "(lr|min-lr|save|load|tensorboard|wandb|eval|log)(-.*)?|oases-report)"
)
_TOKENIZER = re.compile("--(tokenizer-.*|vocab-file|merge-file)")
# The vocabulary's size has influence: with the NullTokenizer Megatron asks for it.
_IN_ITS_PLACE = "--mock-data --train-iters 1 --lr 1e-4 --eval-iters 0 --eval-interval 1000000000 --log-interval 1"

# Megatron's own attention is slower than torch's: the baseline gets the faster one as well.
_FASTEST_WITHOUT_TRANSFORMER_ENGINE = ("--oases-core-attention", "sdpa")

_OWN_FLAGS = {"--train-iters": "--iterations", "--oases-report": "--json", "--oases-only": "--bound"}


def shared_flags(
    *, recompute: str, iterations: int, overrides: Sequence[str], transformer_engine: bool | None = None
) -> list[str]:
    """What every system is run with. The user's flags come last, and argparse takes the last.

    `transformer_engine`: whether it is there where the run takes place. Default: whether it is here.
    """
    _refuse_own(overrides, "after --")
    if transformer_engine is None:
        transformer_engine = Available.detect("cuda").transformer_engine
    fastest = () if transformer_engine else _FASTEST_WITHOUT_TRANSFORMER_ENGINE
    return [
        *_REFERENCE_WORKLOAD.split(),
        *fastest,
        *RECOMPUTE[recompute],
        "--train-iters",
        str(iterations),
        *overrides,
    ]


def planned_flags(flags: Sequence[str]) -> list[str]:
    """A training command's flags, with stand-ins for those that no time depends on.

    The tokenizer is one of them where `--vocab-size` says what there is to know of it.
    """
    names = {flag.partition("=")[0] for flag in flags}
    without_tokenizer = "--vocab-size" in names or not any(map(_TOKENIZER.fullmatch, names))
    kept, keeps = [], True
    for flag in flags:
        if flag.startswith("--"):  # else a value, which goes with its flag
            name = flag.partition("=")[0]
            drops_tokenizer = without_tokenizer and _TOKENIZER.fullmatch(name)
            keeps = not (_WITHOUT_INFLUENCE.fullmatch(name) or drops_tokenizer)
        if keeps:
            kept.append(flag)
    tokenizer = ("--tokenizer-type", "NullTokenizer") if without_tokenizer else ()
    return [*_IN_ITS_PLACE.split(), *tokenizer, *kept]


def system_flags(system: str) -> tuple[str, ...]:
    """What the system adds: `oases`, say, or, with flags of its own, `oases --oases-sub-batches 3`."""
    name, *flags = shlex.split(system) or [""]
    if name not in SYSTEMS:
        raise UsageError(f"--systems {name}: there are {', '.join(SYSTEMS)}")
    _refuse_own(flags, f"in --systems '{system}'")
    return (*SYSTEMS[name], *flags)


def _refuse_own(flags: Sequence[str], where: str) -> None:
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _OWN_FLAGS:
            raise UsageError(f"{name} {where}: compare sets it itself, from {_OWN_FLAGS[name]}")


def world_size(flags: Sequence[str]) -> int:
    """Ranks of one model replica, as the flags have it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.error = _refuse
    parsed = parser.parse_known_args(flags)[0]
    ranks = parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size
    if ranks < 1:
        raise UsageError(
            f"--tensor-model-parallel-size {parsed.tensor_model_parallel_size} x --pipeline-model-parallel-size "
            f"{parsed.pipeline_model_parallel_size} = {ranks} ranks"
        )
    return ranks


def checked_world_size(asked: int | None, flags: Sequence[str]) -> int:
    """--world-size, or where it is not given the ranks of one model replica."""
    replica = world_size(flags)
    ranks = replica if asked is None else asked
    if ranks < 1 or ranks % replica:
        raise UsageError(f"--world-size {ranks} is not a multiple of TP x PP = {replica}")
    return ranks


def _refuse(message: str) -> None:
    raise UsageError(message)
