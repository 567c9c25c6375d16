"""Random states kept per (block, sub-batch), so that a replay draws the same dropout masks in any order.

Megatron's checkpoint function saves the states of one layer and replays layers in reverse order. Here recomputation may
run ahead of its turn, so each piece carries its own states.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.tensor_parallel.random import _fork_rng, _get_all_rng_states, _set_all_rng_states


class RngStates:
    """The CPU's, the device's and Megatron's tracked random states at one moment."""

    def __init__(self):
        self._states = _get_all_rng_states()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws from the saved states inside, and goes on from the present ones afterwards."""
        with _fork_rng():
            _set_all_rng_states(*self._states)
            yield
