"""Rebuilds halves of Megatron layers at their own degree.

Megatron first builds every layer at degree T, as without a plan. So random numbers are drawn as ever, and the whole weights
are those of the plain model bit for bit; initialising sub-groups by themselves would give each copy other weights, since
Megatron seeds by tensor-parallel rank. Then each weight is gathered, and this rank's shard of it goes into a new half,
which has the sub-group for its tensor-parallel group.
"""

import copy

import torch
import torch.distributed as dist
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.oases.plan import LayerDegrees
from megatron.oases.runtime.checkpoints import shard_as_tensor_parallel
from megatron.oases.runtime.groups import SubGroups


def rebuild(layer: TransformerLayer, degrees: LayerDegrees, groups: SubGroups) -> None:
    """Gives a layer's attention and MLP these degrees, where they differ from T.

    The norms stay as they are: every rank has them whole.
    """
    submodules = layer.submodules_config
    if degrees.attention != groups.size:
        settings = _settings(layer, degrees.attention, groups)
        attention = build_module(submodules.self_attention, layer_number=layer.layer_number, **settings)
        _fill(attention, layer.self_attention, degrees.attention, groups)
        shard_as_tensor_parallel(attention, degrees.attention, groups)
        layer.self_attention = attention
    if degrees.mlp != groups.size:
        mlp = submodules.mlp(is_mtp_layer=False, **_settings(layer, degrees.mlp, groups))
        _fill(mlp, layer.mlp, degrees.mlp, groups)
        shard_as_tensor_parallel(mlp, degrees.mlp, groups)
        layer.mlp = mlp


def _settings(layer: TransformerLayer, degree: int, groups: SubGroups) -> dict:
    config, pg_collection = copy.copy(layer.config), copy.copy(layer.pg_collection)
    config.perform_initialization = False
    pg_collection.tp = groups.sub_group(degree)
    return {"config": config, "pg_collection": pg_collection}


@torch.no_grad()
def _fill(new: torch.nn.Module, old: torch.nn.Module, degree: int, groups: SubGroups) -> None:
    """Takes weights, and what Megatron notes on them, from the half of degree T."""
    config = new.config
    for module in new.modules():
        if getattr(module, "config", None) is config:  # the loop changes the model's own configuration later
            module.config = old.config
    new.train(old.training)
    tensor = groups.sub_group(groups.size)
    olds = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        source = olds[name]
        parameter.requires_grad_(source.requires_grad)
        vars(parameter).update(vars(source))
        if getattr(source, "tensor_model_parallel", False):
            whole = _gathered(source, tensor)
            shards = whole.chunk(degree * source.partition_stride, dim=source.partition_dim)
            parameter.copy_(torch.cat(shards[groups.rank % degree :: degree], dim=source.partition_dim))
            # Megatron's norms and counts take such parameters from every rank: the copies must count once.
            parameter.tensor_model_parallel = groups.rank < degree
        else:
            parameter.copy_(source)


def _gathered(parameter: Tensor, tensor: dist.ProcessGroup) -> Tensor:
    """The whole weight. With a stride (gate and up-projection of a gated MLP) each rank has a piece of every part of it."""
    shard = parameter.detach().cuda()  # --use-cpu-initialization leaves it where NCCL does not reach
    shards = [torch.empty_like(shard) for _ in range(tensor.size())]
    dist.all_gather(shards, shard.contiguous(), group=tensor)
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces = [shard.chunk(stride, dim=dim) for shard in shards]
    return torch.cat([pieces[rank][part] for part in range(stride) for rank in range(len(shards))], dim=dim)
