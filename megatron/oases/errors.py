"""How a user's mistake ends a distributed run.

Python's own answer, one traceback per rank, buries the one line that helps; and when the ranks race to exit, the
launcher may end rank 0 before it has spoken. Here rank 0 prints the line and leaves first. The other ranks give it time
to do so; one that is still there afterwards prints the line too, since then it may be alone with the mistake.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

USAGE_EXIT_CODE = 2
_RANK_0_HEAD_START_S = 20.0


class UsageError(ValueError):
    """A mistake in the user's command or files.

    The message is one line that names the flag or file and shows the arithmetic. Raise it on every rank alike; where
    only some ranks can see the fault (a file missing on one server), pass `every_rank=False` and each of them prints.
    """

    def __init__(self, message: str, *, every_rank: bool = True):
        super().__init__(message)
        self.every_rank = every_rank


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Turns a `UsageError` into one printed line and exit code 2 on every rank."""
    try:
        yield
    except UsageError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank != 0 and error.every_rank:
            time.sleep(_RANK_0_HEAD_START_S)  # and with it, as a rule, ended by the launcher
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # os._exit: a process group that is already up would otherwise wait for its peers in a destructor.
        os._exit(USAGE_EXIT_CODE)
