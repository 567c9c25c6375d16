"""Stands in for pretrain_gpt.py: reports iterations of 100 ms, or 50 ms with the Oases schedule, after slow warm-up.

With --oases-only they take 40 ms (compute) or 30 ms (communication), and have no loss.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--train-iters", type=int)
parser.add_argument("--oases-report", type=Path)
parser.add_argument("--oases-schedule", default="vanilla")
parser.add_argument("--oases-only")
parser.add_argument("--fail-with", type=int)
parser.add_argument("--kill-with", type=int)
parser.add_argument("--no-report")
parser.add_argument("--wait-for-sigterm", type=Path)
arguments, _ = parser.parse_known_args()

if "STAND_IN_LOG" in os.environ:
    entry = {
        "schedule": arguments.oases_schedule or "vanilla",
        "only": arguments.oases_only,
        "flags": sys.argv[1:],
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(json.dumps(entry) + "\n")

if arguments.wait_for_sigterm:
    ended = arguments.wait_for_sigterm

    def end(*_) -> None:
        ended.touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
    ended.with_name(f"{ended.name}.waiting").touch()
    time.sleep(60)
if arguments.fail_with:
    print("error: --flag 3 is wrong")
    for number in range(100):
        print(f"printed line {number}")
    sys.exit(arguments.fail_with)
if arguments.kill_with:
    os.kill(os.getpid(), arguments.kill_with)
if arguments.no_report:
    sys.exit(0)

time_ms, loss_shift = (50.0, 1e-6) if arguments.oases_schedule == "oases" else (100.0, 0.0)
if arguments.oases_only:
    time_ms = {"compute": 40.0, "communication": 30.0}[arguments.oases_only]
iterations = [
    {
        "iteration": number,
        "time_ms": 10_000.0 if number <= 2 else time_ms,
        "loss": 7.0 - 0.1 * number + loss_shift if not arguments.oases_only else None,
        "skipped": False,
    }
    for number in range(1, arguments.train_iters + 1)
]
arguments.oases_report.write_text(json.dumps({"iterations": iterations, "tokens_per_iteration": 1024}))
