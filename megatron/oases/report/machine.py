"""Where and with what a number was measured: every published number carries it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def describe_machine(repository: Path) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "megatron_core": metadata.version("megatron-core"),
        "commit": _commit(repository),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    """platform.processor() is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _commit(repository: Path) -> str | None:
    """The checkout's commit, marked when files differ from it; None outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    return described.stdout.strip() or None
