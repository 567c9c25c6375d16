"""Replacing attributes of other modules so that every replacement can be taken back."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replacements:
    """Attributes set on other people's modules and classes, with what stood there before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`; `undo` restores the old value, or removes the name if there was none."""
        # vars() and not getattr(): a class must get back its own entry, not one inherited from a base.
        previous = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if previous is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

        self._undo.append(restore)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Runs `action` when everything is taken back, in reverse order of registration."""
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
