"""Random states kept per (block, sub-batch), so that a replay draws the same dropout masks in any order.

Megatron's checkpoint function saves the states of one layer and replays layers in reverse order. Here recomputation may
run ahead of its turn, so each piece carries its own states.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import (
    _fork_rng,
    _get_all_rng_states,
    _set_all_rng_states,
    get_cuda_rng_tracker,
)

# Far from the seeds of Megatron's own states, which lie within a few thousand of the user's seed.
_SEED_STEP = 1_000_003


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


def add_sub_group_state(degree: int, sub_group: int) -> str:
    """A random state of one sub-group, equal on its ranks, in Megatron's tracker. Returns its name there.

    Megatron's default state is equal on all T ranks: from it all sub-groups would drop the same of their samples.
    """
    name, tracker = f"oases-degree-{degree}", get_cuda_rng_tracker()
    if name not in tracker.get_states():
        tracker.add(name, torch.initial_seed() + _SEED_STEP * degree + sub_group)
    return name
