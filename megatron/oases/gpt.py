"""What Megatron's training loop asks of the one who pretrains a GPT: model, data, and the step from batch to loss.

Imports Megatron, so on the CPU `megatron.oases.host.activate` comes first.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.training import stimer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.oases.arguments import OasesConfig
from megatron.oases.meter import Meter

# A loss that is more than this many times the largest one seen so far counts as spiky.
_SPIKY_LOSS_FACTOR = 10


def model_config(args: Namespace, config: OasesConfig, *, meter: Meter | None = None) -> GPTModelConfig:
    """How to build the model; under a schedule its decoder is attached to it before it is wrapped.

    `meter`: is told of every collective of the schedule.
    """
    model = gpt_config_from_args(args)
    # Left out by gpt_config_from_args in megatron-core 0.19.
    model.rope_scaling_factor = args.rope_scaling_factor
    model.finalize()
    if config.core_attention != "local":
        from megatron.oases.runtime.core_attention import with_core_attention

        model.transformer_layer_spec = lambda model, vp_stage=None: with_core_attention(
            default_layer_spec(model, vp_stage), config.core_attention
        )
    if config.is_scheduled:
        from megatron.oases.runtime import attach_schedule
        from megatron.oases.schedule import ORDERINGS

        recomputed = None
        if config.plan is not None:
            recomputed = [(layer.attention.recomputed, layer.mlp.recomputed) for layer in config.plan.layers]

        def attach(chunks):
            for chunk in chunks:
                attach_schedule(
                    chunk,
                    ordering=ORDERINGS[config.schedule],
                    sub_batches=config.sub_batches,
                    pieces=config.pieces,
                    along_sequence=config.split == "sequence",
                    degrees=config.degrees,
                    recomputed=recomputed,
                    overlap_grad_reduce=args.overlap_grad_reduce,
                    micro_batches=get_num_microbatches,
                    without=config.ablate,
                    meter=meter,
                    timeout=timedelta(minutes=args.distributed_timeout_minutes),
                )
            return chunks

        model.pre_wrap_hooks.append(attach)
    return model


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> list:
    """The training, validation and test set, of at least `num_samples` each; None on ranks that read no data."""
    config = _dataset_config(get_args())
    dataset = MockGPTDataset if config.mock else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, partial(_reads_data, vp_stage), config).build()


# Tells Megatron to call the function on every rank: the builder itself keeps the ranks apart.
build_datasets.is_distributed = True


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = (None, None) if args.mock_data else get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        object_storage_cache_path=args.object_storage_cache_path,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        data_parallel_size=args.data_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )


def _has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=args.pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _needs_batch(vp_stage: int | None) -> bool:
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(get_args(), vp_stage)


def _reads_data(vp_stage: int | None) -> bool:
    """Of each tensor-parallel group one rank reads; it hands the batch to the others."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and _needs_batch(vp_stage)


_BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# Keys of packed sequences, which `get_batch_on_this_tp_rank` looks up whether they are used or not.
_UNUSED_BATCH_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


def get_batch(
    data_iterator: Iterator | None, micro_batch_size: int, vp_stage: int | None
) -> dict[str, torch.Tensor | None]:
    """The next micro-batch, the same on all ranks of a tensor-parallel group. Tensors are `[b, s]`.

    A pipeline stage in the middle needs none and gets None for everything.
    """
    if not _needs_batch(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    batch = {}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {key: read[key].cuda(non_blocking=True) if key in read else None for key in _BATCH_KEYS}
        batch.update(dict.fromkeys(_UNUSED_BATCH_KEYS))
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return {key: batch[key] for key in _BATCH_KEYS}


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the losses of the tokens that count.

    Args:
        loss_mask: 1 for a token that counts, `[b, s]`.
        losses: of each token, `[b, s]`.

    Returns:
        The sum, the number of tokens (Megatron divides by it, over the global batch or over the micro-batch), and
        what is to be logged: sum and number, for Megatron to add up over micro-batches and data-parallel ranks.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    _check_loss(total)
    logged = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {"lm loss": logged}


def _check_loss(total: torch.Tensor) -> None:
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        machine.validate_result(
            result=total, rejection_func=torch.isnan, message="found NaN in local forward loss calculation", fatal=True
        )
        machine.validate_result(
            result=total, rejection_func=torch.isinf, message="found Inf in local forward loss calculation", fatal=True
        )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=total,
            rejection_func=partial(
                machine.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            fatal=False,
        )


def forward_step(data_iterator: Iterator | None, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One micro-batch forward: the model's output, and the function that makes the loss of it."""
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(
            data_iterator,
            args.micro_batch_size if model.training else args.eval_micro_batch_size,
            get_attr_wrapped_model(model, "vp_stage"),
        )
    timers("batch-generator").stop()
    with stimer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(token_loss, batch["loss_mask"])
