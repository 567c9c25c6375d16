"""Patches the mapping that row-parallel linears reduce through (megatron.core.tensor_parallel.mappings).

What: `reduce_from_tensor_model_parallel_region`, as megatron.core.tensor_parallel.layers uses it, is the identity for an
    output whose collective a schedule will start, and Megatron's own otherwise.
Why: a RowParallelLinear reduces inside its forward; a schedule starts that collective itself, and waits for it later.
Versions: megatron-core 0.19.
Can go: when RowParallelLinear takes a flag that leaves its output unreduced.
"""

import functools

from megatron.core.tensor_parallel import layers
from torch import Tensor

from oases_patches.patching import Replacement

COLLECTIVE_IS_SCHEDULED = "oases_collective_is_scheduled"


def _unless_scheduled(original):
    @functools.wraps(original)
    def reduce_from_tensor_model_parallel_region(input_: Tensor, group=None) -> Tensor:
        if getattr(input_, COLLECTIVE_IS_SCHEDULED, False):
            return input_
        return original(input_, group=group)

    return reduce_from_tensor_model_parallel_region


_replacement = Replacement(layers, "reduce_from_tensor_model_parallel_region", _unless_scheduled)
apply, revert = _replacement.apply, _replacement.revert
