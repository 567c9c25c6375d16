"""The repair of Megatron's distributed optimizer still fits the method that it wraps."""

import inspect

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from oases_patches import optimizer_distrib_optimizer as patch

_METHODS = {
    "state_dict": "(self)",
    "load_state_dict": "(self, state_dict)",
    "_set_main_param_and_optimizer_states": "(self, model_param, tensors)",
}


def _patched() -> set[str]:
    return {name for name in _METHODS if "oases_patches" in getattr(DistributedOptimizer, name).__code__.co_filename}


def test_signatures_are_those_that_were_patched():
    assert _patched() == set()
    for name, signature in _METHODS.items():
        assert str(inspect.signature(getattr(DistributedOptimizer, name))) == signature


def test_apply_and_revert_can_be_repeated():
    patch.apply()
    patch.apply()
    assert _patched() == set(_METHODS)
    patch.revert()
    patch.revert()
    assert _patched() == set()


def test_the_state_given_before_the_first_step_is_adam_s_own():
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
    given, plain = (torch.optim.AdamW([parameter], lr=0.1) for parameter in parameters)
    patch._start(given)
    for parameter, optimizer in zip(parameters, (given, plain), strict=True):
        parameter.grad = torch.linspace(1, 2, 5)
        optimizer.step()
    assert torch.equal(*parameters)
    state = given.state[parameters[0]]
    assert state.keys() == plain.state[parameters[1]].keys()
    patch._start(given)
    assert state["step"] == 1
