"""Puts a built GPT model under a schedule."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.oases.errors import UsageError
from megatron.oases.meter import Meter
from megatron.oases.plan import LayerDegrees
from megatron.oases.runtime.building import rebuild
from megatron.oases.runtime.executor import Observer, unobserved
from megatron.oases.runtime.gradients import PeerGradients
from megatron.oases.runtime.groups import SubGroups
from megatron.oases.runtime.layers import check_layer, cut
from megatron.oases.runtime.redistribution import Redistribution
from megatron.oases.runtime.stage import ScheduledStage
from megatron.oases.schedule import ORDERINGS, Filler, Idea, Ordering, Part, Role, build_chain, enclose
from oases_patches import gpt_model, tensor_parallel_layers


def attach_schedule(
    model: GPTModel,
    *,
    sub_batches: int,
    ordering: Ordering = ORDERINGS["oases"],
    pieces: int = 1,
    along_sequence: bool = False,
    degrees: Sequence[LayerDegrees] | None = None,
    recomputed: Sequence[tuple[bool, bool]] | None = None,
    overlap_grad_reduce: bool = False,
    micro_batches: Callable[[], int] = lambda: 1,
    without: frozenset[Idea] = frozenset(),
    observer: Observer = unobserved,
    meter: Meter | None = None,
    timeout: timedelta | None = None,
) -> ScheduledStage:
    """Lets a schedule run `model` from tokens to loss, in training and in evaluation.

    The model keeps its modules, parameters and names, except that halves of layers whose degree is not that of the
    tensor-parallel group are built anew. Every rank of the world must call this.

    Args:
        model: a GPT model, or the pipeline stage of one, before it is wrapped for data parallelism.
        sub_batches: number of sub-batches of a micro-batch.
        ordering: the system whose order it is.
        pieces: into how many pieces it cuts each GEMM that feeds a collective.
        along_sequence: whether they are cut along the sequence, as a micro-batch of one sample must be, instead of the
            batch. Attention has to be causal, and all degrees that of the tensor-parallel group.
        degrees: of every layer of the whole model; by default that of the tensor-parallel group.
        recomputed: for every layer of the whole model, whether attention and MLP are recomputed; by default what
            Megatron's configuration asks for.
        overlap_grad_reduce: whether data parallelism reduces gradients during backward. Its collectives start in the
            order in which gradients become ready, which then has to be the same on every rank.
        micro_batches: tells how many micro-batches the present training iteration has, for a loop that runs each one
            forward and backward before the next one, as Megatron's does without pipeline parallelism.
        without: ideas of the schedule to leave out, to measure what they gain. No result depends on it.
        observer: stands around every operation that runs, to time or draw it.
        meter: is told of every collective of the schedule.
        timeout: of collectives within sub-groups; None: the backend's.

    Raises:
        UsageError: the model has something that the schedule cannot run.
        RuntimeError: the ranks of the tensor-parallel group built different schedules.
    """
    tensor, config = model.pg_collection.tp, model.config
    degrees = degrees or [LayerDegrees(tensor.size(), tensor.size())] * config.num_layers
    if along_sequence and any(degree != tensor.size() for layer in degrees for degree in layer):
        raise ValueError("sub-groups share samples: no sub-batches along the sequence")
    groups = SubGroups(tensor, {degree for layer in degrees for degree in layer}, meter=meter, timeout=timeout)
    own = [layer.layer_number - 1 for layer in model.decoder.layers]
    degrees = [degrees[number] for number in own]
    for layer, layer_degrees in zip(model.decoder.layers, degrees, strict=True):
        check_layer(layer)
        rebuild(layer, layer_degrees, groups)
    keeps_last_layer = ordering.has_ideas and Idea.KEEP_LAST_LAYER not in without
    chain = _chain(
        _recomputed_by_flags(model, keeps_last_layer=keeps_last_layer)
        if recomputed is None
        else [recomputed[number] for number in own],
        degrees,
        tensor.size(),
        embedding=model.pre_process,
        head=model.post_process,
    )
    into, out_of = _redistributions(chain, groups, sequence_parallel=config.sequence_parallel)
    parts = cut(
        model,
        chain,
        groups,
        along_sequence=along_sequence,
        recomputes_row_parallel=ordering.repeats_collectives or Idea.RECOMPUTE_WITHOUT_GEMM in without,
        pieces=pieces,
    )
    filler = Filler.allowed(
        host_sees_completion=groups.collectives(1, tensor.size()).host_sees_completion,
        overlap_grad_reduce=overlap_grad_reduce,
        without=without,
    )
    stage = ScheduledStage(
        parts,
        into=into,
        out_of=out_of,
        tensor_rank=tensor.rank(),
        tensor_size=tensor.size(),
        ordering=ordering,
        sub_batches=sub_batches,
        pieces=pieces,
        along_sequence=along_sequence,
        filler=filler if ordering.has_ideas else Filler(),
        sequence_parallel=config.sequence_parallel,
        micro_batches=micro_batches,
        # Megatron lets data parallelism reduce from the last forward pass on: what was put off must be over by then.
        last_apart=overlap_grad_reduce,
        without=without,
        observer=observer,
    )
    _check_same_on_every_rank(stage.schedule.digest(), tensor)
    tensor_parallel_layers.apply()
    gpt_model.apply()
    model.oases_stage = stage
    _finish_iterations(config, stage, PeerGradients(model, degrees, groups), overlap_grad_reduce)
    return stage


def _recomputed_by_flags(model: GPTModel, *, keeps_last_layer: bool) -> list[tuple[bool, bool]]:
    """Which blocks of each layer Megatron's flags ask to recompute."""
    config, layers = model.config, len(model.decoder.layers)
    match config.recompute_granularity:
        case None | "selective":
            recomputed = 0
        case "full":
            recomputed = layers if config.recompute_method == "uniform" else min(config.recompute_num_layers, layers)
        case other:
            raise UsageError(f"--recompute-granularity {other}: the oases schedule knows full and selective")
    chain = build_chain(
        layers=layers,
        recomputed_layers=recomputed,
        recomputes_mlps=config.recompute_granularity == "selective" and "mlp" in config.recompute_modules,
        embedding=model.pre_process,
        head=model.post_process,
        keeps_last_layer=keeps_last_layer,
    )
    blocks = [part.recomputed for part in chain if part.is_block]
    return list(zip(blocks[::2], blocks[1::2], strict=True))


def _chain(
    recomputed: Sequence[tuple[bool, bool]],
    degrees: Sequence[LayerDegrees],
    tensor_size: int,
    *,
    embedding: bool,
    head: bool,
) -> tuple[Part, ...]:
    blocks = [
        Part(role, is_recomputed, tensor_size // degree)
        for layer in zip(recomputed, degrees, strict=True)
        for role, is_recomputed, degree in zip((Role.ATTENTION, Role.MLP), *layer, strict=True)
    ]
    return enclose(blocks, embedding=embedding, head=head)


def _redistributions(
    chain: Sequence[Part], groups: SubGroups, *, sequence_parallel: bool
) -> tuple[dict[int, Redistribution], dict[int, Redistribution]]:
    """For the places whose number of sub-groups differs from that before them: what brings x in, and its gradient out."""
    into, out_of, before = {}, {}, groups.size
    for place, part in enumerate(chain):
        degree = groups.size // part.sub_groups
        if degree != before:
            into[place] = Redistribution(groups, before, degree, sequence_parallel=sequence_parallel)
            out_of[place] = Redistribution(groups, degree, before, sequence_parallel=sequence_parallel)
        before = degree
    return into, out_of


def _finish_iterations(
    config: TransformerConfig, stage: ScheduledStage, gradients: PeerGradients, overlap_grad_reduce: bool
) -> None:
    """Has the training loop sum the peers' gradients behind Megatron's own reductions.

    Before them it checks that what the schedule was told about the loop is true.
    """
    finalize = config.finalize_model_grads_func or finalize_model_grads

    def finished(model: Sequence[torch.nn.Module], *args, **kwargs) -> None:
        stage.end_iteration()
        for chunk in model:
            overlaps = getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", overlap_grad_reduce)
            if overlaps != overlap_grad_reduce:
                raise RuntimeError(
                    f"attach_schedule was told overlap_grad_reduce={overlap_grad_reduce}, the model has {overlaps}"
                )
        finalize(model, *args, **kwargs)
        gradients.reduce(model)

    config.finalize_model_grads_func = finished


def _check_same_on_every_rank(digest: str, group: dist.ProcessGroup) -> None:
    digests = [None] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks of a tensor-parallel group built different schedules: {digests}")
