"""The systems to compare with train the same model: loss and every gradient equal plain Megatron's."""

import pytest
import torch

from megatron.oases.schedule import ORDERINGS
from tests.distributed.models import ModelCase, assert_close, batch, build, step
from tests.distributed.test_degrees import Training, _equal_plain, _plain
from tests.distributed.test_exactness import BLOCK, FULL, SP, SWIGLU

LLAMA = dict(rope=True, rmsnorm=True, tied=False)
CASES = {
    "full": ModelCase(config=FULL),
    "none": ModelCase(),
    "block": ModelCase(config=BLOCK),
    "llama": ModelCase(**LLAMA, config={**SWIGLU, **FULL, "num_query_groups": 2}),
    "mask, odd batch": ModelCase(masked=True, batch=5, config=FULL),
    "fewer groups than ranks": ModelCase(config={**FULL, "num_query_groups": 1}),
}
WITH_SEQUENCE_PARALLELISM = {
    "full": ModelCase(config={**SP, **FULL}),
    "llama": ModelCase(**LLAMA, config={**SP, **SWIGLU, "num_query_groups": 2}),
}
# A sequence of 10 in 3 pieces, and one piece, which is Megatron's order with nothing decomposed.
ATTACHED = {
    "merak": dict(sub_batches=2),
    "merak in 3": dict(sub_batches=3),
    "domino": dict(sub_batches=2),
    "wang": dict(sub_batches=1, pieces=3),
    "wang in 1": dict(sub_batches=1, pieces=1),
}


def _ordering(name: str) -> dict:
    return dict(ordering=ORDERINGS[name.split()[0]], **ATTACHED[name])


def _equal(rank: int, case: ModelCase, attach: dict):
    from megatron.oases.runtime import attach_schedule

    model, inputs = build(case), batch(case)
    vanilla = step(model, inputs)
    attach_schedule(model, **attach)
    for _ in range(2):  # a second micro-batch finds nothing that the first has left
        loss, gradients = step(model, inputs)
        assert loss == pytest.approx(vanilla[0], rel=1e-6)
        assert_close(gradients, vanilla[1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("system", ATTACHED)
def test_equals_vanilla(world2, system, name):
    world2.run(_equal, case=CASES[name], attach=_ordering(system))


@pytest.mark.parametrize("name", WITH_SEQUENCE_PARALLELISM)
@pytest.mark.parametrize("system", ["merak", "merak in 3", "domino"])
def test_equals_vanilla_with_sequence_parallelism(world2, system, name):
    world2.run(_equal, case=WITH_SEQUENCE_PARALLELISM[name], attach=_ordering(system))


@pytest.mark.parametrize("system", ["merak", "domino", "wang"])
def test_blocks_of_their_own_degrees(world4, system):
    case = _plain(layers=2, config=FULL)
    world4.run(_equal_plain, trainings=[Training(case=case, degrees="4/2,1/4", attach=_ordering(system))])


def _recomputation_equals_none(rank: int, attach: dict, config: dict):
    from megatron.oases.runtime import attach_schedule

    results = []
    for recompute in ({}, FULL):
        case = ModelCase(config={"hidden_dropout": 0.1, "attention_dropout": 0.1, **config, **recompute})
        model = build(case)
        attach_schedule(model, **attach)
        results.append((*step(model, batch(case)), torch.rand(2)))
    (kept_loss, kept, drawn), (loss, gradients, drawn_again) = results
    assert loss == kept_loss and torch.equal(drawn, drawn_again)
    for name, gradient in kept.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("system, config", [("merak", {}), ("merak", SP), ("domino", {}), ("wang", {})])
def test_with_dropout_recomputation_equals_none_bit_for_bit(world2, system, config):
    world2.run(_recomputation_equals_none, attach=_ordering(system), config=config)
