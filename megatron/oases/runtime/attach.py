"""Puts a built GPT model under a schedule."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.oases.runtime.collectives import Collectives
from megatron.oases.runtime.executor import Observer, unobserved
from megatron.oases.runtime.layers import cut
from megatron.oases.runtime.stage import ScheduledStage
from megatron.oases.schedule import Filler, Idea
from oases_patches import gpt_model, tensor_parallel_layers


def attach_schedule(
    model: GPTModel,
    *,
    sub_batches: int,
    along_sequence: bool = False,
    overlap_grad_reduce: bool = False,
    micro_batches: Callable[[], int] = lambda: 1,
    without: frozenset[Idea] = frozenset(),
    collectives: Collectives | None = None,
    observer: Observer = unobserved,
) -> ScheduledStage:
    """Lets the oases schedule run `model` from tokens to loss, in training and in evaluation.

    The model keeps its modules, parameters and names; only who runs them changes. Every rank of the tensor-parallel
    group must call this.

    Args:
        model: a GPT model, or the pipeline stage of one, before it is wrapped for data parallelism.
        sub_batches: number of sub-batches of a micro-batch.
        along_sequence: whether they are cut along the sequence, as a micro-batch of one sample must be, instead of the
            batch. Attention has to be causal.
        overlap_grad_reduce: whether data parallelism reduces gradients during backward. Its collectives start in the
            order in which gradients become ready, which then has to be the same on every rank.
        micro_batches: tells how many micro-batches the present training iteration has, for a loop that runs each one
            forward and backward before the next one, as Megatron's does without pipeline parallelism.
        without: ideas of the schedule to leave out, to measure what they gain. No result depends on it.
        collectives: who runs the collectives; by default those of the model's tensor-parallel group.
        observer: stands around every operation that runs, to time or draw it.

    Raises:
        UsageError: the model has something that the schedule cannot run.
        RuntimeError: the ranks of the tensor-parallel group built different schedules.
    """
    group = model.pg_collection.tp
    collectives = collectives or Collectives(group)
    stage = ScheduledStage(
        cut(model, collectives, along_sequence=along_sequence, without=without),
        sub_batches=sub_batches,
        along_sequence=along_sequence,
        collectives=collectives,
        filler=Filler.allowed(
            host_sees_completion=collectives.host_sees_completion,
            overlap_grad_reduce=overlap_grad_reduce,
            without=without,
        ),
        sequence_parallel=model.config.sequence_parallel,
        micro_batches=micro_batches,
        # Megatron lets data parallelism reduce from the last forward pass on: what was put off must be over by then.
        last_apart=overlap_grad_reduce,
        without=without,
        observer=observer,
    )
    _check_same_on_every_rank(stage.schedule.digest(), group)
    tensor_parallel_layers.apply()
    gpt_model.apply()
    model.oases_stage = stage
    _check_iterations(model.config, stage, overlap_grad_reduce)
    return stage


def _check_iterations(config: TransformerConfig, stage: ScheduledStage, overlap_grad_reduce: bool) -> None:
    """Has the training loop check, before gradients are used, that what the schedule was told about it is true."""
    finalize = config.finalize_model_grads_func or finalize_model_grads

    def checked(model: Sequence[torch.nn.Module], *args, **kwargs) -> None:
        stage.end_iteration()
        for chunk in model:
            overlaps = getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", overlap_grad_reduce)
            if overlaps != overlap_grad_reduce:
                raise RuntimeError(
                    f"attach_schedule was told overlap_grad_reduce={overlap_grad_reduce}, the model has {overlaps}"
                )
        return finalize(model, *args, **kwargs)

    config.finalize_model_grads_func = checked


def _check_same_on_every_rank(digest: str, group: dist.ProcessGroup) -> None:
    digests = [None] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks of a tensor-parallel group built different schedules: {digests}")
