"""Tensors that Megatron asks for on "cuda" are made on the CPU.

Megatron writes `device="cuda"` in its optimizer, gradient clipping, pipeline schedules and loss logging. A torch
function mode sees the arguments of every such call and can change the device; no list of call sites has to be kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.oases.host.replacements import Replacements

_CPU = torch.device("cpu")


def _names_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Turns a CUDA device argument of any torch function into the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _CpuTypesNamedCuda(TorchFunctionMode):
    """Answers `tensor.type()` with the name that the tensor's type would have on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            # An outer one may have answered already: the optimizers' constructors call each other.
            return result if result.startswith("torch.cuda.") else result.replace("torch.", "torch.cuda.", 1)
        return result


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within it the type of a CPU float tensor is 'torch.cuda.FloatTensor': Megatron's optimizers compare names."""
    with _CpuTypesNamedCuda():
        yield


def replace_device_strings(replacements: Replacements) -> None:
    """Turns the mode on in this thread, for the forward and for the backward pass."""
    run_engine = torch.autograd._engine_run_backward

    def run_engine_in_mode(*args: Any, **kwargs: Any) -> Any:
        # A mode is off while torch handles a call that it saw, and `backward` is such a call. But the backward pass
        # runs Megatron's Python as well, for example recomputation.
        with _CudaMeansCpu():
            return run_engine(*args, **kwargs)

    replacements.set(torch.autograd, "_engine_run_backward", run_engine_in_mode)
    mode = _CudaMeansCpu()
    mode.__enter__()
    replacements.on_undo(lambda: mode.__exit__(None, None, None))
