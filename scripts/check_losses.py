"""Says how the loss of a run went, and fails where it did not go as it must: the quickstart's check on itself."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402

_AVERAGED_ITERATIONS = 5  # the quickstart's --log-interval, so that its own lines agree with these
_SMALLEST_FALL = 0.5


def read_losses(report: Path) -> dict[int, float]:
    """The loss of each iteration in a file that --oases-report wrote."""
    try:
        return {entry["iteration"]: entry["loss"] for entry in json.loads(report.read_text())["iterations"]}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{report}: not a report with iterations ({error})") from error


def check_fall(losses: dict[int, float], vocabulary: int) -> str:
    """A model that knows nothing has a loss of ln(vocabulary)."""
    values = list(losses.values())
    first, last = values[0], mean(values[-_AVERAGED_ITERATIONS:])
    story = (f"loss {first:.3f} at first (ln {vocabulary} = {math.log(vocabulary):.3f}), "
             f"{last:.3f} over the last {len(values[-_AVERAGED_ITERATIONS:])} iterations")
    if not last <= first - _SMALLEST_FALL:
        raise UsageError(f"the loss has not fallen by {_SMALLEST_FALL}: {story}")
    return story


def check_resumed(losses: dict[int, float], before: dict[int, float]) -> str:
    """Training that starts anew would count from 1, at the loss of a model that knows nothing."""
    first, last_before = min(losses), max(before)
    last_losses = list(before.values())[-_AVERAGED_ITERATIONS:]
    end = mean(last_losses)
    story = (f"iteration {first} follows {last_before}, at loss {losses[first]:.3f} (this iteration alone) "
             f"after {end:.3f} (over the last {len(last_losses)} iterations)")
    if first != last_before + 1 or not losses[first] <= (end + before[min(before)]) / 2:
        raise UsageError(f"the run was not resumed: {story}")
    return story


def main() -> None:
    parser = OneLineParser(prog="check_losses.py", description=__doc__)
    parser.add_argument("report", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--vocabulary", type=int, metavar="N", help="the run started from nothing with N tokens")
    what.add_argument("--resumed-from", type=Path, metavar="REPORT", help="the run went on where this one ended")
    args: Namespace = parser.parse_args()
    losses = read_losses(args.report)
    if not losses:
        raise UsageError(f"{args.report}: no iterations")
    if args.vocabulary is not None:
        print("  ", check_fall(losses, args.vocabulary))
    else:
        print("  ", check_resumed(losses, read_losses(args.resumed_from)))


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
