"""Patches the parallel linears (megatron.core.tensor_parallel.layers).

What: `ColumnParallelLinear._forward_impl` and `RowParallelLinear._forward_impl` hand over to the schedule that owns the
    linear, while it runs it, and are Megatron's own otherwise.
Why: their autograd function reduces the input gradient and computes the weight gradient within one backward; a schedule
    runs the three apart. The mappings of the column-parallel linear (`copy_to_tensor_model_parallel_region` and the
    all-reduce of its gradient) fall away with it.
Versions: megatron-core 0.19.
Can go: when Megatron's linears offer deferred weight gradients (`backward_dw`) without TransformerEngine.
"""

import functools

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from oases_patches.patching import Replacement
from oases_patches.tensor_parallel_mappings import COLLECTIVE_IS_SCHEDULED


def _scheduled(original, *, row_parallel: bool):
    @functools.wraps(original)
    def _forward_impl(self, input, weight, *args, **kwargs) -> Tensor:
        scheduling = getattr(self, "oases_scheduling", None)
        if scheduling is None or not scheduling.active:
            return original(self, input, weight, *args, **kwargs)
        output = scheduling(input, weight, kwargs["bias"], row_parallel=row_parallel)
        if row_parallel:
            setattr(output, COLLECTIVE_IS_SCHEDULED, True)
        return output

    return _forward_impl


_replacements = (
    Replacement(ColumnParallelLinear, "_forward_impl", functools.partial(_scheduled, row_parallel=False)),
    Replacement(RowParallelLinear, "_forward_impl", functools.partial(_scheduled, row_parallel=True)),
)


def apply() -> None:
    for replacement in _replacements:
        replacement.apply()


def revert() -> None:
    for replacement in _replacements:
        replacement.revert()
