"""Puts a built GPT model under a schedule."""

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.oases.runtime.collectives import Collectives
from megatron.oases.runtime.decoder import ScheduledDecoder
from megatron.oases.runtime.executor import Filler
from megatron.oases.runtime.layers import cut, recomputed_blocks
from oases_patches import tensor_parallel_layers, tensor_parallel_mappings, transformer_block

_MAX_POSTPONED_WGRADS = 8
_MAX_RECOMPUTES_AHEAD = 4


def attach_schedule(model: GPTModel, *, sub_batches: int, overlap_grad_reduce: bool = False) -> ScheduledDecoder:
    """Lets the oases schedule run the decoder of `model`, in training and in evaluation.

    The model keeps its modules, parameters and names; only who runs them changes. Every rank of the tensor-parallel
    group must call this.

    Args:
        model: a GPT model, before it is wrapped for data parallelism.
        sub_batches: number of sub-batches of a micro-batch.
        overlap_grad_reduce: whether data parallelism reduces gradients during backward. Its collectives start in the
            order in which gradients become ready, which then has to be the same on every rank.

    Raises:
        UsageError: the model has layers that the schedule cannot run.
        RuntimeError: the ranks of the tensor-parallel group built different schedules.
    """
    decoder: TransformerBlock = model.decoder
    group = decoder.pg_collection.tp
    collectives = Collectives(group)
    dynamic = collectives.host_sees_completion
    scheduled = ScheduledDecoder(
        [block for layer in decoder.layers for block in cut(layer)],
        recompute=recomputed_blocks(decoder.config, len(decoder.layers)),
        sub_batches=sub_batches,
        collectives=collectives,
        filler=Filler(
            max_postponed_wgrads=_MAX_POSTPONED_WGRADS if dynamic and not overlap_grad_reduce else 0,
            max_recomputes_ahead=_MAX_RECOMPUTES_AHEAD if dynamic else 0,
        ),
    )
    _check_same_on_every_rank(scheduled.schedule.digest(), group)
    for patch in (tensor_parallel_mappings, tensor_parallel_layers, transformer_block):
        patch.apply()
    decoder.oases_scheduled = scheduled
    return scheduled


def _check_same_on_every_rank(digest: str, group: dist.ProcessGroup) -> None:
    digests = [None] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks of a tensor-parallel group built different schedules: {digests}")
