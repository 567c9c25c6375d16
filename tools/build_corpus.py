#!/usr/bin/env python
"""Builds a small corpus of real text from what every machine has: the sources of Python's standard library.

One JSON line a module, `{"text": …, "source": …}`: English in docstrings and comments, code around it. For one
Python version the file is always the same, byte for byte.
"""

import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402

# Installed packages, tests (mostly tables of odd characters), and data written as code.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
_LARGEST_MODULE_BYTES = 100_000
_SHUFFLE_SEED = 1234


def modules(library: Path) -> Iterator[Path]:
    """Source files under `library`, sorted."""
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def documents(library: Path, limit_bytes: int) -> Iterator[dict[str, str]]:
    """Modules in a fixed random order, so that a slice for validation is like the rest, until `limit_bytes` of text."""
    paths = list(modules(library))
    random.Random(_SHUFFLE_SEED).shuffle(paths)
    total_bytes = 0
    for path in paths:
        size_bytes = path.stat().st_size
        if not 0 < size_bytes <= _LARGEST_MODULE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules are kept in other encodings
            continue
        yield {"text": text, "source": path.relative_to(library).as_posix()}
        total_bytes += size_bytes
        if total_bytes >= limit_bytes:
            return


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(prog="build_corpus.py", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON-lines file to write")
    parser.add_argument("--megabytes", type=float, default=4.0, metavar="N",
                        help="text to collect, in units of 10^6 bytes (default: %(default)s)")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")), metavar="FOLDER",
                        help="where the Python sources are (default: this Python's, %(default)s)")
    args = parser.parse_args(argv)
    if args.megabytes <= 0:
        raise UsageError(f"--megabytes {args.megabytes}: more than 0")

    lines = [json.dumps(document) + "\n" for document in documents(args.library, round(args.megabytes * 1e6))]
    if not lines:
        raise UsageError(f"--library {args.library}: no Python sources there")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror}") from error
    print(f"wrote {args.output}: {len(lines)} documents, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
