"""Whether this Python can run a tool at all, told in one line instead of a traceback.

It runs before anything else, under any Python: so it imports nothing but the standard library, and nothing new in it.
"""

import sys
from importlib.util import find_spec

_OLDEST = (3, 12)


def require(*packages: str) -> None:
    """Ends the program where Python is too old or one of the packages is missing."""
    if sys.version_info[:2] < _OLDEST:
        problem = "this is Python {}.{}, and 3.12 or 3.13 is needed".format(*sys.version_info[:2])
    else:
        missing = [package for package in packages if find_spec(package) is None]
        if not missing:
            return
        problem = "{} {} missing in this Python".format(", ".join(missing), "is" if len(missing) == 1 else "are")
    print("error: {}: source .venv/bin/activate".format(problem), file=sys.stderr)
    sys.exit(2)
