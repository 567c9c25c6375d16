"""The flags that Oases adds to Megatron's, and what they mean once read."""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron.oases.command_line import OneLineParser, check_output
from megatron.oases.errors import UsageError
from megatron.oases.plan import LayerDegrees, Plan, parse_degrees, read_plan
from megatron.oases.schedule import MEANING, ORDERINGS, Cut, Idea, Ordering

DEFAULT_SUB_BATCHES = 2
DEFAULT_PIECES = 4
_DEVICES = ("auto", "cuda", "cpu")
_SCHEDULES = tuple(ORDERINGS)
_SPLITS = ("batch", "sequence")
# What only some schedules read.
_READ_BY: dict[str, Callable[[Ordering], bool]] = {
    "--oases-sub-batches": lambda ordering: ordering.cut is Cut.MICRO_BATCHES,
    "--oases-pieces": lambda ordering: ordering.cut is Cut.GEMMS,
    "--oases-split": lambda ordering: ordering.has_ideas,
    "--oases-ablate": lambda ordering: ordering.has_ideas,
}
_CORE_ATTENTIONS = ("local", "sdpa", "te")
_HALVES = ("compute", "communication")


@dataclass(frozen=True, kw_only=True)
class OasesConfig:
    """What the Oases flags ask for.

    Args:
        degrees: of every layer, from --oases-degrees or from the plan; None: all blocks have degree T.
        degrees_flag: the flag that they are from, with its value.
    """

    device: Literal["cuda", "cpu"]
    schedule: str = "vanilla"
    sub_batches: int = 1
    pieces: int = 1
    split: Literal["batch", "sequence"] = "batch"
    ablate: frozenset[Idea] = frozenset()
    degrees: tuple[LayerDegrees, ...] | None = None
    degrees_flag: str | None = None
    plan: Plan | None = None
    plan_force: bool = False
    core_attention: Literal["local", "sdpa", "te"] = "local"
    report: Path | None = None
    report_interval: int | None = None
    only: Literal["compute", "communication"] | None = None

    def __post_init__(self) -> None:
        if self.sub_batches < 1:
            raise UsageError(f"--oases-sub-batches {self.sub_batches} must be at least 1")
        if self.pieces < 1:
            raise UsageError(f"--oases-pieces {self.pieces} must be at least 1")
        if self.report_interval is not None:
            if self.report_interval < 1:
                raise UsageError(f"--oases-report-interval {self.report_interval} must be at least 1")
            if not self.is_scheduled:
                raise UsageError(
                    f"--oases-report-interval {self.report_interval} has no effect with --oases-schedule vanilla, whose collectives "
                    "Megatron starts: leave it out, or add another --oases-schedule"
                )
        if self.report is not None:
            check_output("--oases-report", self.report, replaces=True)
        if self.only is not None and self.report is None:
            raise UsageError(f"--oases-only {self.only} does nothing but measure: add --oases-report FILE")

    @property
    def is_scheduled(self) -> bool:
        """Whether Oases runs the blocks: in another order than Megatron's, or in that for the sake of their degrees."""
        return self.schedule != "vanilla" or self.degrees is not None

    @property
    def scheduling_flag(self) -> str:
        """The flag that asks for it, for messages."""
        return f"--oases-schedule {self.schedule}" if self.schedule != "vanilla" else str(self.degrees_flag)

    @classmethod
    def from_args(cls, args: Namespace, *, device: Literal["cuda", "cpu"]) -> "OasesConfig":
        plan = read_plan(Path(args.oases_plan)) if args.oases_plan is not None else None
        if plan is not None:
            _check_against_plan(args, plan)
        elif args.oases_plan_force:
            raise UsageError("--oases-plan-force has no effect without --oases-plan FILE: leave it out")
        schedule = args.oases_schedule or (plan.schedule if plan is not None else "vanilla")
        sub_batches = plan.sub_batches if plan is not None else args.oases_sub_batches
        ordering = ORDERINGS[schedule]
        for flag, reads in _READ_BY.items():
            value = getattr(args, flag.removeprefix("--").replace("-", "_"))
            if value is not None and not reads(ordering):
                readers = " or ".join(name for name, each in ORDERINGS.items() if reads(each))
                raise UsageError(
                    f"{flag} {value} has no effect with --oases-schedule {schedule}: "
                    f"leave it out, or add --oases-schedule {readers}"
                )
        if ordering.cut is not Cut.MICRO_BATCHES:
            sub_batches = 1
        elif sub_batches is None:
            sub_batches = DEFAULT_SUB_BATCHES
        pieces = 1
        if ordering.cut is Cut.GEMMS:
            pieces = DEFAULT_PIECES if args.oases_pieces is None else args.oases_pieces
        degrees, degrees_flag = _degrees(args, plan)
        return cls(
            device=device,
            schedule=schedule,
            sub_batches=sub_batches,
            pieces=pieces,
            split=args.oases_split or "batch",
            ablate=_parse_ideas(args.oases_ablate),
            degrees=degrees,
            degrees_flag=degrees_flag,
            plan=plan,
            plan_force=args.oases_plan_force,
            core_attention=args.oases_core_attention,
            report=Path(args.oases_report) if args.oases_report is not None else None,
            report_interval=args.oases_report_interval,
            only=args.oases_only,
        )


def _check_against_plan(args: Namespace, plan: Plan) -> None:
    """Refuses the Oases flags that say something else than the plan, and a plan that nothing here runs."""
    path = args.oases_plan
    if plan.schedule not in _SCHEDULES:
        raise UsageError(f"{path}: schedule {plan.schedule!r} is none of {', '.join(_SCHEDULES)}")
    if ORDERINGS[plan.schedule].cut is not Cut.MICRO_BATCHES and plan.sub_batches != 1:
        raise UsageError(
            f"{path}: sub_batches {plan.sub_batches} with schedule {plan.schedule}, which does not cut micro-batches"
        )
    if args.oases_degrees is not None:
        raise UsageError(f"--oases-degrees {args.oases_degrees}: --oases-plan {path} has the degrees; give one of them")
    for flag, key in (("--oases-schedule", "schedule"), ("--oases-sub-batches", "sub_batches")):
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value not in (None, getattr(plan, key)):
            raise UsageError(f"{flag} {value}: --oases-plan {path} has {key} {getattr(plan, key)}; leave the flag out")


def _degrees(args: Namespace, plan: Plan | None) -> tuple[tuple[LayerDegrees, ...] | None, str | None]:
    if plan is not None:
        return tuple(layer.degrees for layer in plan.layers), f"--oases-plan {args.oases_plan}"
    if args.oases_degrees is None:
        return None, None
    if args.num_layers is None:
        raise UsageError(f"--oases-degrees {args.oases_degrees} needs --num-layers")
    degrees = parse_degrees(args.oases_degrees, layers=args.num_layers)
    return degrees, f"--oases-degrees {args.oases_degrees}"


def add_oases_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the group "oases" to Megatron's parser."""
    group = parser.add_argument_group(title="oases")
    _add_device(group)
    group.add_argument(
        "--oases-schedule",
        choices=_SCHEDULES,
        default=None,
        help="How the model runs. vanilla: as in Megatron. oases: in sub-batches, so that the tensor-parallel "
        "communication of one hides behind the computation of another. wang, merak, domino: in the order of Wang et al., "
        "Merak and DeepSpeed-Domino, to compare with. Default: the plan's, without one vanilla.",
    )
    group.add_argument(
        "--oases-sub-batches",
        type=int,
        default=None,
        metavar="N",
        help="Number of sub-batches that --oases-schedule oases, merak or domino splits each micro-batch into. 1 does not "
        f"split. Default: the plan's, without one {DEFAULT_SUB_BATCHES}.",
    )
    group.add_argument(
        "--oases-pieces",
        type=int,
        default=None,
        metavar="N",
        help="Number of pieces that --oases-schedule wang decomposes each GEMM into whose output is communicated. "
        f"Default: {DEFAULT_PIECES}.",
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
        "--oases-degrees",
        default=None,
        metavar="DEGREES",
        help="Tensor-parallel degree of every layer, with any schedule: 4x8,2x16 is degree 4 for eight layers and then 2 "
        "for sixteen; 4/2 is 4 for attention and 2 for the MLP. Each divides --tensor-model-parallel-size. "
        "Default: --tensor-model-parallel-size for all.",
    )
    group.add_argument(
        "--oases-plan",
        default=None,
        metavar="FILE",
        help="Plan file of tools/oases_planner.py: schedule, sub-batches, and every block's degree and recomputation. "
        "Default: none.",
    )
    group.add_argument(
        "--oases-plan-force",
        action="store_true",
        help="Runs a plan that was made for another model or another layout, if it can be run at all. Default: it is refused.",
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
        "--oases-report-interval",
        type=int,
        default=None,
        metavar="N",
        help="Number of iterations after which a line says how long one took and how much communication was hidden, against "
        "the plan's prediction if there is one. Default: one line at the end of the run.",
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
