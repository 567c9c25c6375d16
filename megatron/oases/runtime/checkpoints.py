"""Has halves of layers that have a degree of their own write and read checkpoints as plain tensor parallelism does.

A checkpoint knows nothing of plans then: it is loaded under any other one, and by Megatron itself at any degree. Layers
share one entry for each weight, so that the pieces of all layers must have one size: that of degree T. A rank of a half of degree t has T/t
of them, as have its peers; of each piece another peer is the one that writes it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from megatron.oases.runtime.groups import SubGroups

_Entry = ShardedTensor | ShardedTensorFactory | ShardedObject


def shard_as_tensor_parallel(half: torch.nn.Module, degree: int, groups: SubGroups) -> None:
    """Replaces the half's `sharded_state_dict`.

    Args:
        half: attention or MLP of a layer, of that degree.
        degree: less than T.
        groups: of all degrees.
    """
    megatrons: Callable[..., dict[str, _Entry]] = half.sharded_state_dict

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, _Entry]:
        entries = megatrons(prefix, sharded_offsets, metadata)
        parameters = {prefix + name: parameter for name, parameter in half.named_parameters()}
        for key, entry in entries.items():
            parameter = parameters.get(key)
            if getattr(parameter, "partition_dim", -1) >= 0:
                entries[key] = _in_pieces(entry, parameter, degree, groups, tuple(sharded_offsets))
            else:  # every rank of T has it; Megatron counts within the sub-group
                first, _, last = entry.replica_id
                entries[key] = replace(entry, replica_id=(first, groups.rank, last))
        return entries

    half.sharded_state_dict = sharded_state_dict


def _in_pieces(
    entry: _Entry,
    parameter: torch.nn.Parameter,
    degree: int,
    groups: SubGroups,
    before: tuple[tuple[int, int, int], ...],
) -> ShardedTensorFactory:
    """The same weight in pieces of degree T. `before`: Megatron's offsets of axes that stand before the weight's own."""
    dim, stride = parameter.partition_dim, parameter.partition_stride
    sub_groups, (sub_group, place) = groups.size // degree, divmod(groups.rank, degree)

    def build(key: str, tensor: Tensor, replica_id: tuple[int, int, int], flattened_range: slice | None):
        if flattened_range is not None:
            raise ValueError(f"{key}: an optimizer that keeps flat parts of weights cannot be saved in pieces")
        pieces = tensor.chunk(stride * sub_groups, dim=dim)  # for a gated MLP first those of the gate
        first, _, last = replica_id
        return [
            ShardedTensor.from_rank_offsets(
                key,
                piece,
                *before,
                (dim + len(before), part * groups.size + place * sub_groups + i, stride * groups.size),
                replica_id=(first, (sub_group - i) % sub_groups, last),
                prepend_axis_num=len(before),
            )
            for part in range(stride)
            for i, piece in enumerate(pieces[part * sub_groups : (part + 1) * sub_groups])
        ]

    def merge(pieces: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat(pieces, dim=dim)

    return ShardedTensorFactory(entry.key, parameter, build, merge, entry.replica_id)
