"""Measures on this cluster what the simulator and the planner need to know. See docs/profiler.md."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("torch", "megatron.core", "rich")

from megatron.oases.arguments import choose_device  # noqa: E402
from megatron.oases.command_line import OneLineParser, split_at_double_dash  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.launch import complete_environment  # noqa: E402
from megatron.oases.quiet import silence  # noqa: E402

_FEWEST_REPEATS = 3
# What only makes sense in a training run of its own.
_REFUSED = {
    "--oases-report": "a profile reports no iterations",
    "--oases-only": "a profile has both halves",
    "--oases-ablate": "a profile does not depend on which ideas run",
}


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own arguments, and Megatron's flags."""
    parser = OneLineParser(
        description="Measure computation, collectives, contention and memory for a model on the ranks that this is "
        "started on, by torchrun or tools/emulate_cluster.py, and write them to a profile.",
        usage="torchrun ... oases_profiler.py --output FILE [options] -- MEGATRON FLAGS",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the profile (JSON); until it is whole, FILE.partial"
    )
    parser.add_argument(
        "--restart", action="store_true", help="begin anew, and replace FILE (default: go on from FILE.partial)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        help="training steps timed for each number of samples, half of them in a second pass (default 10)",
    )
    parser.add_argument(
        "--degrees",
        type=int,
        nargs="+",
        metavar="T",
        help="TP degrees to measure (default: all that divide --tensor-model-parallel-size)",
    )
    own, flags = split_at_double_dash(argv)
    arguments = parser.parse_args(own)
    if not arguments.output.name:
        raise UsageError(f"--output {arguments.output} is a folder")
    if arguments.repeats < _FEWEST_REPEATS:
        raise UsageError(f"--repeats {arguments.repeats} must be at least {_FEWEST_REPEATS}")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _REFUSED:
            raise UsageError(f"{name} after --: {_REFUSED[name]}")
    return arguments, flags


def main() -> None:
    with exit_on_usage_error():
        arguments, flags = parse_arguments(sys.argv[1:])
        complete_environment()
        device = choose_device(flags)
        # From here on Megatron may be imported.
        silence()
        if device == "cpu":
            from megatron.oases.host import activate

            activate()
        profile(arguments, flags, device)


def profile(arguments: argparse.Namespace, flags: list[str], device: str) -> None:
    """Sets Megatron up as the flags say, measures, and shows the result on rank 0."""
    import torch.distributed as dist
    from rich.console import Console

    from megatron.oases.measure.profiler import take_profile
    from megatron.oases.measure.setup import initialize
    from megatron.oases.measure.summary import collectives_table, operations_table, remarks
    from megatron.oases.report.tables import output_console

    args, config = initialize(flags, device)
    taken = take_profile(
        args,
        config,
        output=arguments.output,
        restart=arguments.restart,
        repeats=arguments.repeats,
        degrees=arguments.degrees,
        command=shlex.join(["oases_profiler.py", *sys.argv[1:]]),
        console=Console(stderr=True),
    )
    if dist.get_rank() == 0:
        console = output_console()
        console.print(operations_table(taken))
        console.print(collectives_table(taken))
        for line in remarks(taken):
            console.print(line, markup=False, highlight=False)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
