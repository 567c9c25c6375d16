"""Takes the tensor-parallel mappings (megatron.core.tensor_parallel.mappings) out of a layer's forward.

What: `without_collectives(function)` is the same function with the mappings that it reduces through replaced by the identity.
Why: a row-parallel linear and a vocabulary-parallel embedding reduce inside their forward; a schedule starts that
    collective itself, and waits for it later. The mappings themselves stay as they are for everybody else.
Versions: megatron-core 0.19.
Can go: when these layers take a flag that leaves their output unreduced.
"""

from collections.abc import Callable
from types import FunctionType

from torch import Tensor

_REPLACED = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


def without_collectives(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same code, where what would be reduced is returned as it is: this rank's share."""
    replaced = {name: _unreduced for name in _REPLACED if name in function.__code__.co_names}
    assert replaced, f"{function.__qualname__} uses none of {', '.join(_REPLACED)}"
    same = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def _unreduced(input_: Tensor, group=None) -> Tensor:
    return input_
