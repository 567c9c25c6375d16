"""What is refused when a checkpoint of another plan is loaded, and which random states stay."""

from argparse import Namespace

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import checkpointing

from megatron.oases.errors import UsageError
from oases_patches import training_checkpointing

BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
WEIGHTS = {"distrib_optim_sharding_type": "fully_reshardable"}


@pytest.fixture
def loading(monkeypatch):
    """Loads a made-up checkpoint through the patch."""

    def load(state, *, rank0=True, **changes):
        monkeypatch.setattr(checkpointing, "_load_base_checkpoint", lambda load_dir, args, rank0: (state, "", False, None))
        training_checkpointing.apply()
        options = dict(
            ckpt_format="torch_dist", use_distributed_optimizer=True, no_load_optim=False, finetune=False,
            oases_layer_degrees="4,2x3",
        )  # fmt: skip
        return checkpointing._load_base_checkpoint("there", Namespace(**{**options, **changes}), rank0=rank0)[0]

    yield load
    training_checkpointing.revert()


def _state(content=BUCKETS, **saved):
    return {"args": Namespace(tensor_model_parallel_size=4, num_layers=4, **saved), "content_metadata": content}


@pytest.mark.parametrize(
    "state, changes",
    [
        (_state(oases_layer_degrees="4,2x3"), {}),  # the same plan
        (_state(), {"oases_layer_degrees": "4x4"}),  # plain Megatron's
        (_state(WEIGHTS), {}),
        (_state(), {"no_load_optim": True}),
        (_state(), {"finetune": True}),
        (_state(no_save_optim=True), {}),
        (_state(), {"use_distributed_optimizer": False}),
        (_state(oases_layer_degrees="4,2x3"), {"ckpt_format": "torch"}),
    ],
)
def test_what_can_be_loaded(loading, state, changes):
    assert loading(state, **changes) is state


@pytest.mark.parametrize(
    "state, changes, part",
    [
        (_state(), {}, "--dist-ckpt-optim-fully-reshardable"),
        (_state(oases_layer_degrees="2x4"), {}, "of degrees 2x4; this run's are 4,2x3"),
        (_state(oases_layer_degrees="2x4"), {"oases_layer_degrees": "4x4"}, "(dp_reshardable)"),
        (_state(WEIGHTS), {"ckpt_format": "torch"}, "--ckpt-format torch holds the shards of layers of degrees 4x4"),
    ],
)
def test_what_is_bound_to_a_plan_is_refused(loading, state, changes, part):
    with pytest.raises(UsageError) as refusal:
        loading(state, **changes)
    assert part in str(refusal.value)


def test_random_states_that_the_checkpoint_lacks_stay(loading):
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states({"mine": torch.tensor([1]), "both": torch.tensor([2])})
    try:
        state = _state() | {"rng_state": [{"rng_tracker_states": {"both": torch.tensor([3])}}]}
        (loaded,) = loading(state, rank0=False)["rng_state"]
    finally:
        tracker.set_states(before)
    assert {name: int(value) for name, value in loaded["rng_tracker_states"].items()} == {"mine": 1, "both": 3}
