"""Repairs saving and resuming with torch's Adam (megatron.core.optimizer.distrib_optimizer).

What: three methods of `DistributedOptimizer`. `state_dict` works before the first step, too. Setting the state of a
    parameter leaves its "step" alone, which checkpoints keep with the parameter groups, and records no gradient. After
    loading, every parameter has a "step" of its own.
Why: with torch's Adam, which Megatron uses when neither Transformer Engine nor apex is installed, the first asserts.
    The second raises KeyError for one checkpoint format, and for another puts back the step of a fresh optimizer;
    with parameters in fp32 it also fails on a view that requires a gradient. Then all parameters share one step
    tensor, which each of them increments: like a wrong step, that makes the bias correction silently wrong.
Versions: megatron-core 0.19.
Can go: when a run resumed with torch's Adam and --use-distributed-optimizer repeats an uninterrupted one in plain
    Megatron.
"""

import functools
from collections.abc import Callable

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from oases_patches.patching import Patch, Replacement


def _from_the_start(state_dict: Callable) -> Callable:
    @functools.wraps(state_dict)
    def run(self: DistributedOptimizer) -> dict:
        if isinstance(self.optimizer, torch.optim.Adam):
            _start(self.optimizer)
        return state_dict(self)

    return run


def _start(adam: torch.optim.Adam) -> None:
    """Gives parameters that have no state yet the one that Adam itself would start from."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _without_step_or_gradient(set_states: Callable) -> Callable:
    @functools.wraps(set_states)
    def run(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict) -> None:
        with torch.no_grad():
            # What is no tensor is left as it is: the step that came with the parameter group.
            set_states(self, model_param, {**tensors, "step": None})

    return run


def _with_own_steps(load_state_dict: Callable) -> Callable:
    @functools.wraps(load_state_dict)
    def run(self: DistributedOptimizer, state_dict: dict) -> None:
        load_state_dict(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return run


_patch = Patch(
    Replacement(DistributedOptimizer, "state_dict", _from_the_start),
    Replacement(DistributedOptimizer, "_set_main_param_and_optimizer_states", _without_step_or_gradient),
    Replacement(DistributedOptimizer, "load_state_dict", _with_own_steps),
)
apply, revert = _patch.apply, _patch.revert
