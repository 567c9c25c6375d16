"""The few places where Megatron itself insists on a GPU."""

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch

from megatron.oases.host.device_strings import cuda_type_names
from megatron.oases.host.replacements import Replacements


def _with_cuda_type_names(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with cuda_type_names():
            return function(*args, **kwargs)

    return run


def _without_cuda(initialize_megatron: Callable) -> Callable:
    """Lets Megatron initialise without CUDA, but with groups and seeds, which it sets up if it counts a device."""

    @functools.wraps(initialize_megatron)
    def run(*args: Any, **kwargs: Any) -> Any:
        truth = torch.cuda.device_count
        torch.cuda.device_count = lambda: 1
        try:
            return initialize_megatron(*args, **{**kwargs, "allow_no_cuda": True})
        finally:
            torch.cuda.device_count = truth

    return run


def _skip_if_compiled(compile_helpers: Callable) -> Callable:
    """The released wheel holds the compiled dataset helper, but not the Makefile that the call runs."""

    @functools.wraps(compile_helpers)
    def run() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            compile_helpers()

    return run


def _own_queue() -> Callable[[], queue.SimpleQueue]:
    """For the results of a save, which on the CPU is written by the rank itself.

    Megatron's goes through a process of its own, which imports everything once more on the same cores, and stays behind
    when its rank is killed.
    """
    own: queue.SimpleQueue = queue.SimpleQueue()
    return lambda mp_mode="spawn": own


def replace_megatron_calls(replacements: Replacements) -> None:
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training import initialize, training

    replacements.set(training, "initialize_megatron", _without_cuda(initialize.initialize_megatron))
    # Runs fused functions once so that they are compiled, which nothing is here.
    replacements.set(training, "set_jit_fusion_options", lambda tp_size=None: None)
    replacements.set(dataset_utils, "compile_helpers", _skip_if_compiled(dataset_utils.compile_helpers))

    replacements.set(filesystem_async, "get_write_results_queue", _own_queue())

    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    replacements.set(clip_grads, "clip_grad_by_total_norm_fp32", clip)
    replacements.set(optimizer, "clip_grad_by_total_norm_fp32", clip)
    for optimizer_class in (optimizer.Float16OptimizerWithFloat16Params, DistributedOptimizer):
        replacements.set(optimizer_class, "__init__", _with_cuda_type_names(optimizer_class.__init__))
