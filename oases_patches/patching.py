"""How a patch replaces an attribute and puts it back."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Replacement:
    """Replaces `owner.name` by `make(original)`; the original stays reachable for `revert`."""

    owner: Any
    name: str
    make: Any
    _original: Any = field(default=None, init=False)

    @property
    def applied(self) -> bool:
        return self._original is not None

    def apply(self) -> None:
        if not self.applied:
            self._original = getattr(self.owner, self.name)
            setattr(self.owner, self.name, self.make(self._original))

    def revert(self) -> None:
        if self.applied:
            setattr(self.owner, self.name, self._original)
            self._original = None


class Patch:
    """Several replacements that are applied and reverted together."""

    def __init__(self, *replacements: Replacement):
        self._replacements = replacements

    def apply(self) -> None:
        for replacement in self._replacements:
            replacement.apply()

    def revert(self) -> None:
        for replacement in self._replacements:
            replacement.revert()
