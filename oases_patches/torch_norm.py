"""Patches torch's norms as Megatron wraps them (megatron.core.transformer.torch_norm).

What: `WrappedTorchNorm` builds a norm under sequence parallelism too, and marks its parameters `sequence_parallel`.
Why: Megatron refuses it, though the norm itself needs no change: each rank sees its own part of the sequence, and Megatron
    sums the gradients of parameters so marked over the tensor-parallel group. Without apex or TransformerEngine there
    would be no norm for sequence parallelism, vanilla or scheduled.
Versions: megatron-core 0.19.
Can go: when WrappedTorchNorm marks its parameters itself.
"""

import copy

from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.nn import Module

from oases_patches.patching import Replacement


def _marked(original):
    def __new__(cls, config, *args, **kwargs) -> Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(__new__)


_replacement = Replacement(WrappedTorchNorm, "__new__", _marked)
apply, revert = _replacement.apply, _replacement.revert
