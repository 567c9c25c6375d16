"""Predicts an iteration without running it, from a cluster file or a profile. See docs/simulator.md."""

import argparse
import json
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("torch", "megatron.core", "rich", "matplotlib", "yaml")

from rich.console import Console  # noqa: E402

from megatron.oases.command_line import OneLineParser, check_output, split_at_double_dash  # noqa: E402
from megatron.oases.cost.prediction import FlagParser, predict  # noqa: E402
from megatron.oases.cost.result import Prediction  # noqa: E402
from megatron.oases.cost.sources import cluster_source, profile_source  # noqa: E402
from megatron.oases.emulation.cluster import check_bandwidth  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.report.comparison import WARM_UP_ITERATIONS  # noqa: E402
from megatron.oases.report.machine import describe_machine  # noqa: E402
from megatron.oases.report.predictions import memory_table, predictions_table, times_table  # noqa: E402
from megatron.oases.report.progress import runs_progress  # noqa: E402
from megatron.oases.report.runs import REPOSITORY, RunFailed  # noqa: E402
from megatron.oases.report.systems import (  # noqa: E402
    COMPARED,
    RECOMPUTE,
    checked_world_size,
    planned_flags,
    shared_flags,
    system_flags,
)
from megatron.oases.report.tables import output_console  # noqa: E402
from megatron.oases.report.trace import chrome_trace  # noqa: E402
from megatron.oases.report.validation import (  # noqa: E402
    WORKLOADS,
    Compared,
    Validation,
    cases,
    measure,
    take_profile,
    validation_table,
)

_PICTURES = (".png", ".svg", ".pdf")
# Of one or the other use of the tool only.
_PREDICTING = ("world_size", "recompute", "trace", "png")
_VALIDATING = ("nic_gbps", "workloads", "rounds", "iterations", "folder")


def parse_arguments(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The tool's own arguments, and Megatron's flags."""
    parser = OneLineParser(
        description="Predict the time and the memory of a training iteration. MEGATRON FLAGS are those of the training "
        "command; without any it is the reference workload of tools/compare.py.",
        usage="oases_simulator.py (--cluster NAME|FILE | --profile FILE | --validate) [options] [-- MEGATRON FLAGS]",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--cluster", metavar="NAME|FILE", help="a shipped cluster, or a cluster file (YAML)")
    source.add_argument("--profile", type=Path, metavar="FILE", help="what tools/oases_profiler.py measured")
    source.add_argument(
        "--validate",
        action="store_true",
        help="compare predictions with measured runs, both on the emulated cluster; needs root",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        default=list(COMPARED),
        metavar="SYSTEM",
        help=f"as in tools/compare.py; quoted, with flags of their own (default: {' '.join(COMPARED)})",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="devices (default: TP x PP, that is DP 1)")
    parser.add_argument("--recompute", choices=RECOMPUTE, help="of the reference workload (default full)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (JSON; opens in Perfetto)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline (or .svg, .pdf)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    validating = parser.add_argument_group("with --validate")
    validating.add_argument(
        "--nic-gbps", type=float, nargs="+", metavar="G", help="NICs, Gbit/s (default 1 0.5 0.25)"
    )
    validating.add_argument(
        "--workloads",
        type=int,
        nargs="+",
        metavar="N",
        help="by number: " + "; ".join(f"{i} {each.name}" for i, each in enumerate(WORKLOADS, 1)) + " (default: all)",
    )
    validating.add_argument("--rounds", type=int, help="runs of each system, in alternation, of which the fastest counts (default 2)")
    validating.add_argument(
        "--iterations", type=int, help=f"of a run, {WARM_UP_ITERATIONS} of them warm-up (default 10)"
    )
    validating.add_argument(
        "--folder", type=Path, help="where profiles are kept, and used again (default: profiles, made if need be)"
    )
    own, overrides = split_at_double_dash(argv)
    arguments = parser.parse_args(own)
    _check(arguments, overrides)
    if overrides:
        return arguments, planned_flags(overrides)
    recompute = arguments.recompute or "full"
    return arguments, shared_flags(recompute=recompute, iterations=1, overrides=(), transformer_engine=False)


def _check(arguments: Namespace, overrides: Sequence[str]) -> None:
    for name in _PREDICTING if arguments.validate else _VALIDATING:
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} has no meaning {'with' if arguments.validate else 'without'} --validate")
    if arguments.validate and overrides:
        raise UsageError("MEGATRON FLAGS have no meaning with --validate, which has its own workloads")
    if overrides and arguments.recompute is not None:
        raise UsageError(f"--recompute {arguments.recompute} is for the reference workload; say it in MEGATRON FLAGS")
    for system in arguments.systems:
        system_flags(system)
    if len(set(arguments.systems)) != len(arguments.systems):
        raise UsageError(f"--systems {' '.join(arguments.systems)} names a system twice")
    if arguments.png is not None and arguments.png.suffix not in _PICTURES:
        raise UsageError(f"--png {arguments.png}: the file's name must end in one of {', '.join(_PICTURES)}")
    for flag in ("trace", "png", "json"):
        if (path := getattr(arguments, flag)) is not None:
            check_output(f"--{flag}", path)
    if arguments.validate:
        _check_validation(arguments)


def _check_validation(arguments: Namespace) -> None:
    for nic_gbps in arguments.nic_gbps or ():
        check_bandwidth("--nic-gbps", nic_gbps)
    for number in arguments.workloads or ():
        if not 1 <= number <= len(WORKLOADS):
            raise UsageError(f"--workloads {number}: there are 1 to {len(WORKLOADS)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.iterations is not None and arguments.iterations <= WARM_UP_ITERATIONS:
        raise UsageError(f"--iterations {arguments.iterations} must be more than {WARM_UP_ITERATIONS}, which warm up")


def run_prediction(arguments: Namespace, flags: Sequence[str]) -> None:
    if arguments.cluster is not None:
        source = cluster_source(arguments.cluster)
    else:
        source = profile_source(arguments.profile)
    ranks = checked_world_size(arguments.world_size, flags)
    predictions = predict(
        flags,
        arguments.systems,
        source,
        parser=FlagParser(),
        world_size=ranks,
        record=arguments.trace is not None or arguments.png is not None,
        announce=lambda line: print(f"note: {line}", file=sys.stderr),
    )
    console = output_console()
    console.print(predictions_table(predictions, title=f"{ranks} devices, predicted from {source.name}"))
    console.print(times_table(predictions))
    console.print(memory_table(predictions))
    _write(arguments, predictions)


def _write(arguments: Namespace, predictions: Mapping[str, Prediction]) -> None:
    if arguments.trace is not None:
        _write_json("--trace", arguments.trace, chrome_trace(predictions))
    if arguments.png is not None:
        from megatron.oases.report.timeline import draw_timeline

        try:
            draw_timeline(predictions, arguments.png)
        except OSError as error:
            raise UsageError(f"--png {arguments.png} cannot be written: {error.strerror}") from None
    if arguments.json is not None:
        systems = {name: prediction.to_json() for name, prediction in predictions.items()}
        _write_json("--json", arguments.json, {"systems": systems, "command": shlex.join(["python", *sys.argv])})


def _write_json(flag: str, path: Path, content: object) -> None:
    try:
        path.write_text(json.dumps(content) + "\n")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None


def run_validation(arguments: Namespace) -> None:
    rounds, iterations = arguments.rounds or 2, arguments.iterations or 10
    folder = arguments.folder or Path("profiles")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be made: {error.strerror}") from None
    chosen = list(
        cases(arguments.workloads or range(1, len(WORKLOADS) + 1), arguments.nic_gbps or (1.0, 0.5, 0.25))
    )
    cores, compared, parser = len(os.sched_getaffinity(0)), [], FlagParser()
    about = {"command": shlex.join(["python", *sys.argv]), "machine": describe_machine(REPOSITORY)}
    with runs_progress(Console(stderr=True), total=len(chosen)) as progress:
        for case in chosen:
            progress.start(case.name)
            launcher, path = case.launcher(cores), case.profile_path(folder)
            if not path.exists():
                # All ranks are one tensor-parallel group here, and no other degree is predicted.
                take_profile(
                    case.name,
                    case.workload.flags(1),
                    launcher,
                    path,
                    degrees=[launcher.ranks],
                    on_line=progress.line,
                )
            measured_ms = measure(
                case, launcher, arguments.systems, rounds=rounds, iterations=iterations, on_line=progress.line
            )
            predictions = predict(
                case.workload.flags(iterations),
                arguments.systems,
                profile_source(path),
                parser=parser,
                world_size=launcher.ranks,
                record=False,
                announce=progress.line,
            )
            own = [
                Compared(case=case, system=name, predicted_ms=prediction.iteration_ms, measured_ms=measured_ms[name])
                for name, prediction in predictions.items()
            ]
            compared += own
            progress.finish(case.name, ", ".join(f"{each.system} {each.error:+.1%}" for each in own))
            validation = Validation(compared=tuple(compared))
            if arguments.json is not None:  # after every case: one that fails later loses nothing
                _write_json("--json", arguments.json, validation.to_json() | about)
    output_console().print(validation_table(validation))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    with exit_on_usage_error():
        arguments, flags = parse_arguments(sys.argv[1:])
        try:
            if arguments.validate:
                run_validation(arguments)
            else:
                run_prediction(arguments, flags)
        except RunFailed as error:
            print(*error.last_lines, sep="\n", file=sys.stderr)
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
