"""Running the released Megatron on the CPU.

Megatron's training loop asks for CUDA at many small places and needs it at none: over gloo the same loop trains on any
machine. `activate()` closes the gaps; see docs/cpu.md for what it changes.
"""

import os
import sys

import torch

from megatron.oases.host.replacements import Replacements

# Megatron prefers these to torch's own, and they only know CUDA tensors.
_CUDA_PACKAGES = ("transformer_engine", "apex", "amp_C", "fused_weight_gradient_mlp_cuda", "flash_attn")


def activate() -> Replacements:
    """Makes Megatron run on the CPU in this process and thread; `.undo()` of the result takes it back.

    Call it before Megatron is imported: what is decided on import stays decided after `undo`, for example that
    nothing is compiled.
    """
    replacements = Replacements()
    # A GPU that is there, but not to be used (--oases-device cpu), is not there for torch either.
    _set_variable(replacements, "CUDA_VISIBLE_DEVICES", "")
    _hide_packages(replacements)
    # Megatron's modules call torch.compile when they are imported, which is when torch reads the variable.
    _disable_compilation(replacements)
    # Megatron insists on it for tensor parallelism; it orders the kernels of a GPU.
    _set_variable(replacements, "CUDA_DEVICE_MAX_CONNECTIONS", "1")

    from megatron.oases.host.cuda_stand_ins import replace_cuda_calls
    from megatron.oases.host.device_strings import replace_device_strings
    from megatron.oases.host.megatron_calls import replace_megatron_calls
    from megatron.oases.host.rng import replace_cuda_rng

    replace_cuda_calls(replacements)
    replace_cuda_rng(replacements)
    replace_megatron_calls(replacements)
    replace_device_strings(replacements)
    return replacements


def _hide_packages(replacements: Replacements) -> None:
    """Lets `import` fail as if they were not installed, unless they are imported already."""
    for name in _CUDA_PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = None
            replacements.on_undo(lambda name=name: sys.modules.pop(name))


def _disable_compilation(replacements: Replacements) -> None:
    # torch.compile would trace into the stand-ins, and for Megatron's small functions it does not pay on the CPU.
    _set_variable(replacements, "TORCHDYNAMO_DISABLE", "1")
    # For functions that were compiled before, if Megatron is imported already.
    torch.compiler.set_stance("force_eager")
    replacements.on_undo(lambda: torch.compiler.set_stance("default"))


def _set_variable(replacements: Replacements, name: str, value: str) -> None:
    previous = os.environ.get(name)
    os.environ[name] = value

    def restore() -> None:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous

    replacements.on_undo(restore)
