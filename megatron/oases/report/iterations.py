"""Time and loss of every training iteration, as a JSON file.

Megatron logs both, rounded and mixed with other lines. Comparisons need them in full precision and as data.
"""

import functools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_WRITE_EVERY = 10


class IterationReport:
    """Collects iterations and keeps the file up to date, so that it survives a run that is killed.

    Args:
        path: the JSON file.
        run: what describes the run, for example its world size; stands beside the iterations.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self._path = path
        self._run = run
        self._iterations: list[dict[str, Any]] = []

    def add(self, *, iteration: int, time_ms: float, loss: float | None, skipped: bool) -> None:
        """Adds one iteration.

        Args:
            iteration: counted from 1, and on from the checkpoint when a run is resumed.
            time_ms: from the start of the step to its end.
            loss: mean over the tokens of the global batch. JSON has no infinity: it is written as null.
            skipped: the optimizer left the parameters alone, because a gradient overflowed in fp16.
        """
        finite = loss is not None and math.isfinite(loss)
        self._iterations.append(
            {"iteration": iteration, "time_ms": time_ms, "loss": loss if finite else None, "skipped": skipped}
        )
        if len(self._iterations) % _WRITE_EVERY == 1:
            self.write()

    def write(self) -> None:
        """Replaces the file in one step: who reads it meanwhile sees the old or the new one, whole."""
        content = {"schema_version": SCHEMA_VERSION, **self._run, "iterations": self._iterations}
        unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        try:
            unfinished.write_text(json.dumps(content, allow_nan=False) + "\n")
            os.replace(unfinished, self._path)
        except OSError as error:  # a full disk is no reason to stop training
            print(f"oases: --oases-report {self._path} could not be written: {error.strerror}", flush=True)
            unfinished.unlink(missing_ok=True)


def report_steps(
    train_step: Callable[..., tuple],
    report: IterationReport,
    *,
    is_reporter: Callable[[], bool],
    synchronize: Callable[[], None],
) -> Callable[..., tuple]:
    """Wraps Megatron's `train_step` so that `report` gets every iteration of one rank.

    Args:
        train_step: `megatron.training.training.train_step`.
        report: where the iterations go.
        is_reporter: whether this rank reports; asked at each step, since ranks have no role before training starts.
        synchronize: returns when the device has finished its work.
    """

    @functools.wraps(train_step)
    def run(*args: Any, iteration: int, **kwargs: Any) -> tuple:
        synchronize()
        start_s = time.perf_counter()
        result = train_step(*args, iteration=iteration, **kwargs)
        synchronize()
        time_ms = (time.perf_counter() - start_s) * 1e3
        if is_reporter():
            losses, skipped = result[0], result[1]
            loss = losses["lm loss"].item() if "lm loss" in losses else None
            report.add(iteration=iteration + 1, time_ms=time_ms, loss=loss, skipped=bool(skipped))
        return result

    return run
