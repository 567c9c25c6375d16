"""What the command lines under tools/ share: errors of one line, and the `--` that ends a tool's own flags."""

import argparse
from collections.abc import Sequence
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
