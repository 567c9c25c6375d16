"""Finding JSON-lines files, and reading them as numbered pieces that are worth sending to another process."""

import glob
import gzip
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.oases.errors import UsageError

# Small enough that a short file still occupies every worker.
_LINES_PER_PIECE = 64
_BYTES_PER_PIECE = 256 * 1024


@dataclass(frozen=True)
class Piece:
    """Consecutive lines of one file; `first_number` counts from 1, as editors do."""

    path: str
    first_number: int
    lines: tuple[bytes, ...]


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that names and patterns mean, patterns sorted."""
    paths = []
    for name in inputs:
        if os.path.isdir(name):
            pattern = os.path.join(name, "*.jsonl")
            raise UsageError(f"--input {name}: a folder, not a file; give a pattern such as '{pattern}'")
        found = [name] if os.path.exists(name) else sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not found:
            raise UsageError(f"--input {name}: no such file")
        paths += found
    return paths


def read_pieces(paths: Sequence[str]) -> Iterator[Piece]:
    """All lines of `paths` in order; a piece never spans two files. Files ending in .gz are decompressed."""
    for path in paths:
        try:
            yield from _pieces_of(path)
        except (OSError, EOFError) as error:
            raise UsageError(f"--input {path}: {getattr(error, 'strerror', None) or error}") from error


def _pieces_of(path: str) -> Iterator[Piece]:
    number, first_number = 0, 1
    lines: list[bytes] = []
    size_bytes = 0
    # Bytes, not text: decoding happens in the workers, and a line that is not UTF-8 is reported with its number.
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            lines.append(line)
            size_bytes += len(line)
            if len(lines) == _LINES_PER_PIECE or size_bytes >= _BYTES_PER_PIECE:
                yield Piece(path, first_number, tuple(lines))
                first_number, lines, size_bytes = number + 1, [], 0
    if lines:
        yield Piece(path, first_number, tuple(lines))
