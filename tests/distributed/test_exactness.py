"""The oracle is plain Megatron: equal loss, and an equal gradient for every parameter."""

import pytest
import torch

from tests.distributed.models import ModelCase, assert_close, batch, build, step

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective")
# Without biases: Megatron's own recomputation of an MLP that returns its bias recurses for ever (megatron-core 0.19).
SELECTIVE_MLP = dict(
    recompute_granularity="selective", recompute_modules=["core_attn", "mlp"], add_bias_linear=False
)
SWIGLU = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False)

CASES = {
    "plain": ModelCase(),
    "full": ModelCase(config=FULL),
    "block": ModelCase(config=BLOCK),
    "selective": ModelCase(config=SELECTIVE),
    "selective_mlp": ModelCase(config=SELECTIVE_MLP),
    "llama_full": ModelCase(rope=True, rmsnorm=True, tied=False, config={**SWIGLU, **FULL, "num_query_groups": 2}),
    "llama": ModelCase(rope=True, rmsnorm=True, tied=False, config={**SWIGLU, "num_query_groups": 2}),
    "fewer_groups_than_ranks": ModelCase(config={**FULL, "num_query_groups": 1}),
    "qk_norm_and_qkv_bias": ModelCase(config={**FULL, "add_qkv_bias": True, "add_bias_linear": False}),
    "mask": ModelCase(masked=True, config=FULL),
    "one_layer": ModelCase(layers=1, config=FULL),
    "odd_batch": ModelCase(batch=5, config=FULL),
    "sdpa": ModelCase(rope=True, sdpa=True, config={**FULL, "num_query_groups": 2}),
    "sdpa_mask": ModelCase(masked=True, sdpa=True),
    "fp32_residual": ModelCase(config={**FULL, "fp32_residual_connection": True}),
}


SP = dict(sequence_parallel=True)
SEQUENCE_PARALLEL_CASES = {
    "plain": ModelCase(config=SP),
    "full": ModelCase(config={**SP, **FULL}),
    "block": ModelCase(config={**SP, **BLOCK}),
    "llama_full": ModelCase(
        rope=True, rmsnorm=True, tied=False, config={**SP, **SWIGLU, **FULL, "num_query_groups": 2}
    ),
    "rope_tied": ModelCase(rope=True, config=SP),
    "odd_batch": ModelCase(batch=3, rope=True, config={**SP, **FULL}),
}


# Along the sequence: a micro-batch of one sample, odd chunks (a sequence of 10 in 3), several samples, masks of their own.
SEQUENCE_CASES = {
    "one sample": ModelCase(batch=1),
    "full": ModelCase(batch=1, config=FULL),
    "llama_full": ModelCase(
        batch=1, rope=True, rmsnorm=True, tied=False, config={**SWIGLU, **FULL, "num_query_groups": 2}
    ),
    "mask": ModelCase(masked=True, config=FULL),
    "sdpa": ModelCase(batch=1, rope=True, sdpa=True, config={**FULL, "num_query_groups": 2}),
}


def _both(rank: int, case: ModelCase, sub_batches: int, along_sequence: bool = False):
    from megatron.oases.runtime import attach_schedule

    model, inputs = build(case), batch(case)
    vanilla = step(model, inputs)
    attach_schedule(model, sub_batches=sub_batches, along_sequence=along_sequence)
    oases = step(model, inputs)
    assert oases[0] == pytest.approx(vanilla[0], rel=1e-6)
    assert_close(oases[1], vanilla[1])


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_vanilla(world2, name, sub_batches):
    world2.run(_both, case=CASES[name], sub_batches=sub_batches)


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("name", SEQUENCE_CASES)
def test_equals_vanilla_along_the_sequence(world2, name, sub_batches):
    world2.run(_both, case=SEQUENCE_CASES[name], sub_batches=sub_batches, along_sequence=True)


@pytest.mark.parametrize("sub_batches", [2, 3])
@pytest.mark.parametrize("name", SEQUENCE_PARALLEL_CASES)
def test_equals_vanilla_with_sequence_parallelism(world2, name, sub_batches):
    world2.run(_both, case=SEQUENCE_PARALLEL_CASES[name], sub_batches=sub_batches)


@pytest.mark.parametrize("name", ["llama_full", "plain", "fewer_groups_than_ranks"])
def test_equals_vanilla_on_four_ranks(world4, name):
    world4.run(_both, case=CASES[name], sub_batches=2)
