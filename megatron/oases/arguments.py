"""The flags that Oases adds to Megatron's, and what they mean once read."""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron.oases.command_line import OneLineParser, check_output
from megatron.oases.errors import UsageError
from megatron.oases.schedule import MEANING, Idea

DEFAULT_SUB_BATCHES = 2
_DEVICES = ("auto", "cuda", "cpu")
_SCHEDULES = ("vanilla", "oases")
_SPLITS = ("batch", "sequence")
# What only the schedule reads.
_SCHEDULE_FLAGS = ("--oases-sub-batches", "--oases-split", "--oases-ablate")
_CORE_ATTENTIONS = ("local", "sdpa", "te")
_HALVES = ("compute", "communication")


@dataclass(frozen=True, kw_only=True)
class OasesConfig:
    """What the Oases flags ask for."""

    device: Literal["cuda", "cpu"]
    schedule: Literal["vanilla", "oases"] = "vanilla"
    sub_batches: int = 1
    split: Literal["batch", "sequence"] = "batch"
    ablate: frozenset[Idea] = frozenset()
    core_attention: Literal["local", "sdpa", "te"] = "local"
    report: Path | None = None
    only: Literal["compute", "communication"] | None = None

    def __post_init__(self) -> None:
        if self.sub_batches < 1:
            raise UsageError(f"--oases-sub-batches {self.sub_batches} must be at least 1")
        if self.report is not None:
            check_output("--oases-report", self.report, replaces=True)
        if self.only is not None and self.report is None:
            raise UsageError(f"--oases-only {self.only} does nothing but measure: add --oases-report FILE")

    @classmethod
    def from_args(cls, args: Namespace, *, device: Literal["cuda", "cpu"]) -> "OasesConfig":
        sub_batches = args.oases_sub_batches
        if args.oases_schedule == "vanilla":
            for flag in _SCHEDULE_FLAGS:
                value = getattr(args, flag.removeprefix("--").replace("-", "_"))
                if value is not None:
                    raise UsageError(
                        f"{flag} {value} has no effect with --oases-schedule vanilla: "
                        "leave it out, or add --oases-schedule oases"
                    )
            sub_batches = 1
        elif sub_batches is None:
            sub_batches = DEFAULT_SUB_BATCHES
        return cls(
            device=device,
            schedule=args.oases_schedule,
            sub_batches=sub_batches,
            split=args.oases_split or "batch",
            ablate=_parse_ideas(args.oases_ablate),
            core_attention=args.oases_core_attention,
            report=Path(args.oases_report) if args.oases_report is not None else None,
            only=args.oases_only,
        )


def add_oases_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the group "oases" to Megatron's parser."""
    group = parser.add_argument_group(title="oases")
    _add_device(group)
    group.add_argument(
        "--oases-schedule",
        choices=_SCHEDULES,
        default="vanilla",
        help="How the decoder runs. vanilla: as in Megatron. oases: in sub-batches, so that the tensor-parallel "
        "communication of one hides behind the computation of another. Default: vanilla.",
    )
    group.add_argument(
        "--oases-sub-batches",
        type=int,
        default=None,
        metavar="N",
        help="Number of sub-batches that --oases-schedule oases splits each micro-batch into. 1 does not split. "
        f"Default: {DEFAULT_SUB_BATCHES}.",
    )
    group.add_argument(
        "--oases-split",
        choices=_SPLITS,
        default=None,
        help="Along what --oases-schedule oases cuts sub-batches. batch: samples, as evenly as they can be cut. "
        "sequence: positions, for micro-batches of one sample; attention must be causal. "
        "Default: batch.",
    )
    group.add_argument(
        "--oases-ablate",
        default=None,
        metavar="IDEA[,IDEA]",
        help="Leaves ideas of the oases schedule out, to measure what they gain; results stay the same. "
        + "; ".join(f"{idea.value}: {meaning}" for idea, meaning in MEANING.items())
        + ". Default: none is left out.",
    )
    group.add_argument(
        "--oases-core-attention",
        choices=_CORE_ATTENTIONS,
        default="local",
        help="Core attention of --transformer-impl local, with any schedule. local: Megatron's own. sdpa: "
        "torch.nn.functional.scaled_dot_product_attention, which does not keep the scores. te: Transformer Engine's. "
        "Default: local; with --oases-schedule oases te, where it is installed.",
    )
    group.add_argument(
        "--oases-report",
        default=None,
        metavar="FILE",
        help="JSON file for the time (ms) and the loss of every training iteration. A file that is there is replaced. "
        "Default: none is written.",
    )
    group.add_argument(
        "--oases-only",
        choices=_HALVES,
        default=None,
        help="For measuring; trains nothing useful. compute: training steps without the tensor-parallel collectives. "
        "communication: after a first step as it is, only its tensor-parallel collectives, on zeros. Needs "
        "--oases-report. Default: both halves run.",
    )
    return parser


def _parse_ideas(text: str | None) -> frozenset[Idea]:
    known = [idea.value for idea in Idea]
    ideas = [] if text is None else text.split(",")
    for idea in ideas:
        if idea not in known:
            raise UsageError(f"--oases-ablate {text}: {idea!r} is none of {', '.join(known)}")
    return frozenset(map(Idea, ideas))


def choose_device(argv: Sequence[str]) -> Literal["cuda", "cpu"]:
    """Reads `--oases-device` by itself: Megatron's own parser can only be built once the device is known."""
    parser = OneLineParser(add_help=False)
    _add_device(parser)
    wanted = parser.parse_known_args(argv)[0].oases_device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--oases-device cuda: torch finds no GPU here (torch.cuda.is_available() is False)")
    return wanted


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--oases-device",
        choices=_DEVICES,
        default="auto",
        help="Where to train. auto: on the GPU if torch finds one, else on the CPU over gloo. Default: auto.",
    )


def given_flags(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """What `argv` itself says: only the flags that stand in it, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    try:
        return parser.parse_known_args(argv)[0]
    finally:
        for action, default in defaults:
            action.default = default
