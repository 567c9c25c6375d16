"""What a forward pass keeps for backward, counted with saved-tensor hooks."""

import dataclasses
import weakref

import pytest
import torch

from tests.distributed.models import ModelCase, batch, build
from tests.distributed.test_exactness import FULL, SP, SWIGLU

LLAMA = dict(rope=True, rmsnorm=True, tied=False, config=SWIGLU)


class _Kept:
    """Stands in a graph for the tensor that the graph keeps; gone when the graph is."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def _kept_bytes(case: ModelCase, scheduled: bool, **attach_arguments) -> int:
    """Bytes of storages, parameters aside, that are kept between forward and backward."""
    from megatron.oases.runtime import attach_schedule

    model, inputs = build(case), batch(case)
    if scheduled:
        attach_schedule(model, sub_batches=2, **attach_arguments)
    alive = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor.detach())
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        loss = model(**inputs)
    tensors = [kept.tensor for kept in alive]
    if scheduled:
        tensors += [cell.x for cell in _stage_function(loss).tape.cells.values() if cell.x is not None]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.values() if tensor is not None}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for place, size in storages.items() if place not in parameters | given)


def _stage_function(loss: torch.Tensor):
    node = loss.grad_fn
    while not hasattr(node, "tape"):
        node = node.next_functions[0][0]
    return node


def _activations_a_layer(rank: int, case: ModelCase, scheduled: bool, **attach_arguments) -> float:
    """In units of [s, b, h]: what two more layers add."""
    few, many = (
        _kept_bytes(dataclasses.replace(case, layers=layers), scheduled, **attach_arguments) for layers in (2, 4)
    )
    return (many - few) / 2 / (case.sequence * case.batch * case.hidden * 4)


def _case(config: dict, **changes) -> ModelCase:
    return ModelCase(**{**LLAMA, **changes, "config": {**SWIGLU, **config}})


@pytest.mark.parametrize(
    "config, attach_arguments, expected",
    [
        (FULL, {}, 2.0),
        (FULL, dict(along_sequence=True), 2.0),
        ({**FULL, **SP}, {}, 1.0),  # two of [s/2, b, h]
    ],
    ids=["plain", "along sequence", "sequence parallel"],
)
def test_full_recomputation_keeps_two_activations_a_layer(world2, config, attach_arguments, expected):
    kept = world2.run(_activations_a_layer, case=_case(config), scheduled=True, **attach_arguments)
    assert kept == [expected] * 2


def test_megatron_keeps_one_with_full_recomputation(world2):
    """The same count for vanilla Megatron, where the answer is known."""
    assert world2.run(_activations_a_layer, case=_case(FULL), scheduled=False) == [1.0] * 2


def test_without_recomputation_about_as_much_as_megatron(world2):
    vanilla, oases = (
        world2.run(_activations_a_layer, case=_case({}), scheduled=scheduled) for scheduled in (False, True)
    )
    assert 4 < oases[0] <= vanilla[0] * 1.02
