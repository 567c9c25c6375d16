"""From the command line to Megatron's validated arguments, with every mistake in one line.

Megatron checks its flags with assertions, each rank on its own, and argparse answers a wrong flag with eight hundred
others. Here both become one `UsageError`, and our own checks come first: they need no tokenizer, file or process
group.
"""

import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron.oases.arguments import OasesConfig, add_oases_arguments, given_flags
from megatron.oases.available import Available, choose_defaults, refuse_impossible
from megatron.oases.cost.records import to_json
from megatron.oases.degrees_support import check_block_flags
from megatron.oases.errors import UsageError
from megatron.oases.inputs import check_inputs
from megatron.oases.plan import LayerDegrees, format_degrees
from megatron.oases.sizes import check_shards, check_sizes
from megatron.oases.support import check_only, check_schedule, check_script


def parse(
    device: str,
    argv: Sequence[str] | None = None,
    *,
    available: Available | None = None,
    possible: Available | None = None,
) -> tuple[Namespace, OasesConfig]:
    """Parses and checks the command line, and sets up Megatron's global variables with it.

    Args:
        device: where the run takes place, as `choose_device` found it.
        argv: the command line without the program's name. Default: `sys.argv`.
        available: what Megatron's defaults are chosen for. Default: what this machine has.
        possible: what flags may ask for. Default: the same.
    """
    from megatron.training.arguments import parse_and_validate_args

    argv = sys.argv[1:] if argv is None else argv
    available = available or Available.detect(device)
    changed: list[str] = []

    def prepare(parser):
        parser.error = _raise_usage_error
        _mend_help(parser)
        add_oases_arguments(parser)
        given = given_flags(parser, argv)
        refuse_impossible(given, possible or available)
        # Blocks of their own degrees are run by Oases in any order.
        is_scheduled = "oases_degrees" in given or "oases_plan" in given
        schedule = "oases" if is_scheduled else getattr(given, "oases_schedule", "vanilla")
        core_attention = getattr(given, "oases_core_attention", "local")
        changed.extend(
            choose_defaults(
                parser,
                given,
                available,
                schedule=schedule,
                split=getattr(given, "oases_split", "batch"),
                core_attention=core_attention,
            )
        )
        args = parser.parse_known_args(argv)[0]
        check_script(args)
        check_sizes(args)
        _check_evaluation(args)
        config = OasesConfig.from_args(args, device=device)
        check_schedule(args, config)
        check_only(args, config)
        check_inputs(args)
        if args.tokenizer_type == "GPT2BPETokenizer":
            from oases_patches import tokenizers_megatron_hf_tokenizer

            tokenizers_megatron_hf_tokenizer.apply()
        return parser

    with megatron_refusals():
        args = parse_and_validate_args(extra_args_provider=prepare)
    config = OasesConfig.from_args(args, device=device)
    # Again: a checkpoint (--use-checkpoint-args) may have changed what the command line said.
    check_schedule(args, config)
    check_shards(args)
    check_block_flags(args, config)
    _note_in_checkpoints(args, config)
    if changed and args.rank == 0:
        where = "on the CPU" if device == "cpu" else "without all of Transformer Engine and apex"
        print(f"oases: {where}, so by default {' '.join(changed)}", flush=True)
    if config.only is not None and args.rank == 0:
        print(f"oases: --oases-only {config.only}: this run measures; it trains nothing useful", flush=True)
    if config.schedule != "vanilla" and args.tensor_model_parallel_size == 1 and args.rank == 0:
        print(
            "oases: --tensor-model-parallel-size is 1: there is no tensor-parallel communication to hide; "
            "the schedule runs all the same",
            flush=True,
        )
    return args, config


def _note_in_checkpoints(args: Namespace, config: OasesConfig) -> None:
    """Megatron writes its arguments into every checkpoint; what blocks had which degree goes with them."""
    tensor = args.tensor_model_parallel_size
    args.oases_layer_degrees = format_degrees(config.degrees or [LayerDegrees(tensor, tensor)] * args.num_layers)
    args.oases_plan_content = None if config.plan is None else to_json(config.plan)


def _mend_help(parser: ArgumentParser) -> None:
    """Megatron has a help text with a percent sign in it, on which argparse fails for every `--help`."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, KeyError, TypeError):
            action.help = action.help.replace("%", "%%")


def _check_evaluation(args: Namespace) -> None:
    # Megatron divides by it to size the validation set, whether it evaluates or not.
    if args.eval_interval is None and args.yaml_cfg is None and not args.skip_train and not args.full_validation:
        raise UsageError("--eval-interval is missing: give the number of iterations between two evaluations")


def _raise_usage_error(message: str) -> NoReturn:
    raise UsageError(f"{message} (see --help)")


_REFUSALS = (AssertionError, ValueError, RuntimeError, OSError, ImportError)


@contextmanager
def megatron_refusals() -> Iterator[None]:
    """Turns what Megatron raises while it checks its arguments into a `UsageError`."""
    import megatron.core
    import megatron.training

    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        folders = Path(frame.filename).parents
        is_megatrons = any(Path(package.__path__[0]) in folders for package in (megatron.core, megatron.training))
        if Path(__file__).parent in folders or not (is_megatrons or isinstance(error, _REFUSALS)):
            raise  # a fault of ours, not of the flags
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = lines[0] if lines else frame.line
        raise UsageError(f"Megatron refuses these flags: {message} ({frame.filename}:{frame.lineno})") from error
