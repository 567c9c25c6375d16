"""Resumes under a plan from what was saved under another one, or refuses (megatron.training.checkpointing).

What: `_load_base_checkpoint`. Reading a checkpoint's arguments, which comes first, compares the degrees that its layers had
    with those of this run, and refuses others where the format holds the shards of ranks instead of whole weights.
    Random states that a block's sub-groups have of their own stay as they are where the checkpoint has none.
Why: such formats would be read into wrong shards, or fail deep inside. Megatron replaces all of its random states by
    those of the checkpoint, and the first dropout in a sub-group would fail.
Versions: megatron-core 0.19.
Can go: with per-block degrees.
"""

import functools
from argparse import Namespace
from collections.abc import Callable

import megatron.training.checkpointing as checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.oases.errors import UsageError
from oases_patches.patching import Patch, Replacement

_MINE = "oases_layer_degrees"  # among Megatron's arguments, which every checkpoint contains


def _checked(load: Callable) -> Callable:
    @functools.wraps(load)
    def run(load_dir: str, args: Namespace, rank0: bool = False, **others):
        loaded = load(load_dir, args, rank0=rank0, **others)
        state = loaded[0]
        if state is not None and "args" in state and hasattr(args, _MINE):
            if rank0:
                _check_degrees(load_dir, args, state)
            else:
                _keep_own_states(state)
        return loaded

    return run


def _check_degrees(load_dir: str, args: Namespace, state: dict) -> None:
    saved, mine = _degrees(state["args"]), getattr(args, _MINE)
    if saved == mine:
        return
    if args.ckpt_format == "torch":
        raise UsageError(
            f"--load {load_dir}: --ckpt-format torch holds the shards of layers of degrees {saved}; this run's are {mine}. "
            "Save with --ckpt-format torch_dist to change degrees"
        )
    loads_optimizer = not (args.no_load_optim or args.finetune or getattr(state["args"], "no_save_optim", False))
    sharding = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if args.use_distributed_optimizer and loads_optimizer:
        if sharding not in DistributedOptimizer.checkpoint_fully_reshardable_formats:
            raise UsageError(
                f"--load {load_dir}: its distributed optimizer ({sharding}) holds the shards of layers of degrees {saved}; "
                f"this run's are {mine}. Save with --dist-ckpt-optim-fully-reshardable to change degrees, or start a "
                "fresh optimizer with --no-load-optim"
            )


def _degrees(saved: Namespace) -> str:
    """A run of plain Megatron has one for all."""
    return getattr(saved, _MINE, f"{saved.tensor_model_parallel_size}x{saved.num_layers}")


def _keep_own_states(state: dict) -> None:
    own = get_cuda_rng_tracker().get_states()
    for rng_state in state.get("rng_state") or ():
        tracked = rng_state.get("rng_tracker_states")
        if tracked:  # else the checkpoint has none at all, which Megatron reports
            rng_state["rng_tracker_states"] = own | tracked


_patch = Patch(Replacement(checkpointing, "_load_base_checkpoint", _checked))
apply, revert = _patch.apply, _patch.revert
