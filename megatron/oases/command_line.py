"""What the command lines under tools/ share: errors of one line, and the `--` that ends a tool's own flags."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

from megatron.oases.errors import UsageError


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of printing its whole usage."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def split_at_double_dash(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits at the first `--`: the tool's own flags, and what it passes on."""
    argv = list(argv)
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1:]


def check_output(flag: str, path: Path, *, replaces: bool = False) -> None:
    """Raises `UsageError` for a file that cannot be written: before the work, not behind it.

    Args:
        flag: that names the file.
        path: the file.
        replaces: whether another file takes its place in one step; else it is opened and written.
    """
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise UsageError(f"{flag} {path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise UsageError(f"{flag} {path} is a folder")
    is_there = os.path.exists(path)
    if replaces and is_there and not os.path.isfile(path):
        raise UsageError(f"{flag} {path} is there, and not a file that may be replaced")
    try:
        if is_there and not replaces:
            with path.open("ab"):
                pass
        else:
            with TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
