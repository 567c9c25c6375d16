"""The user's run made small: fewer layers, one TP degree, no pipeline, and nothing loaded, saved or learnt."""

from argparse import Namespace
from collections.abc import Iterator

import torch
from megatron.core import parallel_state, tensor_parallel

# Too small to change a weight: a long measurement must not train the model into NaNs.
_LEARNING_RATE = 1e-12
_LOSS_SCALE = 2.0**10  # the usual first ones overflow, and the optimizer would leave out its first steps


def changes(base: Namespace, *, degree: int, layers: int, kept: bool) -> dict:
    """What is different from the user's run: Megatron's arguments by name."""
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = base.recompute_granularity == "selective"
    unrecomputed = {
        "recompute_granularity": "selective" if selective else None,
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    return {
        "num_layers": layers,
        "encoder_num_layers": layers,
        "tensor_model_parallel_size": degree,
        "expert_tensor_parallel_size": degree,
        "pipeline_model_parallel_size": 1,
        "transformer_pipeline_model_parallel_size": 1,
        "data_parallel_size": base.world_size // degree,
        "sequence_parallel": base.sequence_parallel and degree > 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        # Data-parallel communication is measured apart.
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "step_batch_size_schedule": None,
        "load": None,
        "pretrained_checkpoint": None,
        "save": None,
        "skip_train": False,
        "lr": _LEARNING_RATE,
        "min_lr": 0.0,
        "lr_warmup_init": 0.0,
        "lr_warmup_iters": 0,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "lr_decay_style": "constant",
        "initial_loss_scale": min(base.initial_loss_scale, _LOSS_SCALE),
        **(unrecomputed if kept else recomputed),
    }


def regroup(args: Namespace, degree: int) -> None:
    """Puts Megatron's process groups up for a TP degree and without pipeline parallelism, if they are not."""
    present = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if present == (degree, 1):
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degree,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)


def random_batches(args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens; the same micro-batch again and again, since what stands in it takes no time to find out."""
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(0, args.padded_vocab_size, shape, generator=generator, device="cpu")
    batch = {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "loss_mask": torch.ones(shape, device="cpu"),
        "position_ids": torch.arange(args.seq_length, device="cpu").expand(shape).contiguous(),
    }
    if args.create_attention_mask_in_dataloader:
        hidden = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool, device="cpu").triu(1)
        batch["attention_mask"] = hidden.expand(shape[0], 1, -1, -1).contiguous()
    while True:
        yield batch
