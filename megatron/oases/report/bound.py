"""How near a system comes to what its own computation and communication allow."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Times of one iteration (ms) on the same machine: as it is, and each half alone."""

    measured_ms: float
    compute_only_ms: float
    communication_only_ms: float

    @property
    def bound_ms(self) -> float:
        """No order of the same operations is faster than its slower half."""
        return max(self.compute_only_ms, self.communication_only_ms)

    @property
    def efficiency(self) -> float:
        return self.bound_ms / self.measured_ms

    @property
    def communication_hidden(self) -> float:
        """Share of the communication that computation hides: what is not hidden comes on top of computation."""
        exposed_ms = self.measured_ms - self.compute_only_ms
        return min(1.0, max(0.0, 1.0 - exposed_ms / self.communication_only_ms))
