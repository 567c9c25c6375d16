"""Megatron's CUDA random states kept in torch's CPU generator.

On a GPU there are two generators, the CPU's and the device's; without one, dropout and initialisation draw from the
CPU's. So what Megatron calls the CUDA state is the state of the CPU generator, and its tracker of named states works
as it is. Then nothing else may draw from that generator in mid-run, or a resumed run would see other dropout masks
than one that went through. Data loaders draw a seed whenever they start to iterate: they get generators of their own.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron.oases.host.replacements import Replacements


def _get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _with_own_generator(build_data_loader: Callable) -> Callable:
    @functools.wraps(build_data_loader)
    def build(*args: Any, **kwargs: Any) -> Any:
        loader = build_data_loader(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()
        return loader

    return build


def _is_expected(record: logging.LogRecord) -> bool:
    # The tracker warns when the CPU's generator moves while a "CUDA" state is in use. Here that is its purpose.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def replace_cuda_rng(replacements: Replacements) -> None:
    """Maps the CUDA random state, in torch and in Megatron's tracker, to the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.training import training

    for owner in (torch.cuda, torch.cuda.random):
        replacements.set(owner, "get_rng_state", _get_state)
        replacements.set(owner, "set_rng_state", _set_state)
        replacements.set(owner, "manual_seed", _manual_seed)
    replacements.set(megatron_random, "_get_cuda_rng_state", _get_state)
    replacements.set(megatron_random, "_set_cuda_rng_state", _set_state)

    replacements.set(
        training, "build_pretraining_data_loader", _with_own_generator(training.build_pretraining_data_loader)
    )

    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(_is_expected)
    replacements.on_undo(lambda: logger.removeFilter(_is_expected))
