"""Sums the gradients of a block with sub-groups, each of which has seen only its own samples."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.oases.plan import LayerDegrees
from megatron.oases.runtime.groups import SubGroups


class PeerGradients:
    """The gradients of a model that are to be summed over peers, one all-reduce a block.

    Args:
        model: with every half at its own degree.
        degrees: of its layers, in order.
        groups: of these degrees.
    """

    def __init__(self, model: GPTModel, degrees: Sequence[LayerDegrees], groups: SubGroups):
        self._blocks: list[tuple[dist.ProcessGroup, list[torch.nn.Parameter]]] = []
        for layer, layer_degrees in zip(model.decoder.layers, degrees, strict=True):
            for degree, modules in (
                (layer_degrees.attention, (layer.input_layernorm, layer.self_attention)),
                (layer_degrees.mlp, (layer.pre_mlp_layernorm, layer.mlp)),
            ):
                if degree != groups.size:
                    parameters = [
                        parameter
                        for module in modules
                        for name, parameter in module.named_parameters()
                        if not _is_summed_by_megatron(model, name, parameter)
                    ]
                    self._blocks.append((groups.peers(degree), parameters))

    def reduce(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Sums them in place, after Megatron has done all that it does with gradients.

        Args:
            chunks: the wrapped model; tells which part of a gradient this rank's distributed optimizer uses.
        """
        owned = _Owned(chunks)
        for group, parameters in self._blocks:
            gradients = [gradient for parameter in parameters for gradient in owned.gradients(parameter)]
            for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
                parts = [gradient for gradient in gradients if gradient.dtype is dtype]
                together = _flatten_dense_tensors(parts)
                dist.all_reduce(together, group=group)
                for part, summed in zip(parts, _unflatten_dense_tensors(together, parts), strict=True):
                    part.copy_(summed)


def _is_summed_by_megatron(model: GPTModel, name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether `finalize_model_grads` sums it over all T ranks, and with them over the sub-groups."""
    config = model.config
    by_sequence = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    return by_sequence or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))


class _Owned:
    """Which part of each gradient is valid on this rank: all of it, or its share for the distributed optimizer."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._buffers = {}
        for chunk in chunks:
            if hasattr(chunk, "ddp_config") and chunk.ddp_config.use_distributed_optimizer:
                self._buffers.update((parameter, buffer) for buffer in chunk.buffers for parameter in buffer.params)

    def gradients(self, parameter: torch.nn.Parameter) -> list[Tensor]:
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is None:
            return []
        if parameter not in self._buffers:
            return [gradient]
        buffer = self._buffers[parameter]
        own_start, own_end, bucket_id = buffer.param_index_map[parameter]
        bucket = buffer.buckets[bucket_id]
        share = bucket.grad_data.numel() // buffer.data_parallel_group.size()
        first = bucket.offset + share * buffer.data_parallel_group.rank()
        start, end = max(own_start, first), min(own_end, first + share)
        return [gradient.view(-1)[start - own_start : end - own_start]] if start < end else []
