"""Core attention by other means than Megatron's own, for vanilla and scheduled runs alike.

Megatron's own core attention without TransformerEngine writes the scores `[b, heads, s, s]` to memory and keeps them for
backward. `torch.nn.functional.scaled_dot_product_attention` picks a kernel that does not, and so does Transformer Engine.
"""

from contextlib import nullcontext

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.oases.errors import UsageError


class SdpaCoreAttention(torch.nn.Module):
    """Takes the place of Megatron's `DotProductAttention`: same arguments, same result to rounding.

    Raises:
        UsageError: the configuration asks for something that torch's function does not do.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__()
        _check(config)
        self._sequence_parallel = config.sequence_parallel
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        # --apply-query-key-layer-scaling changes nothing here: Megatron divides the scores by the layer's number and
        # multiplies them again in its softmax, so that fp16 can hold them. Here they are never stored.

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query: [s, b, heads/t, d].
            key, value: [s, b, groups/t, d].
            attention_mask: [b or 1, 1, s, s], True where it hides; None for the causal mask.

        Returns:
            [s, b, heads/t · d].
        """
        assert attention_bias is None and packed_seq_params is None
        assert attention_mask is not None or attn_mask_type in (None, AttnMaskType.causal)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # Which mask a head drops must differ between ranks. Under sequence parallelism Megatron has seen to that already.
        forks = self._dropout > 0 and self.training and not self._sequence_parallel
        with get_cuda_rng_tracker().fork() if forks else nullcontext():
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=self._dropout if self.training else 0.0,
                is_causal=attention_mask is None,
                scale=self._scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)


def with_core_attention(spec: ModuleSpec, name: str) -> ModuleSpec:
    """The layer specification with another core attention.

    Args:
        spec: of a layer made of Megatron's local modules.
        name: `sdpa`, or `te` for Transformer Engine's.
    """
    if name == "sdpa":
        module = SdpaCoreAttention
    else:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention as module
    spec.submodules.self_attention.submodules.core_attention = module
    return spec


def _check(config: TransformerConfig) -> None:
    for used, flag in (
        (config.window_size is not None, "--window-size"),
        (config.softmax_type != "vanilla", f"--softmax-type {config.softmax_type}"),
        (config.context_parallel_size > 1, f"--context-parallel-size {config.context_parallel_size}"),
    ):
        if used:
            raise UsageError(f"{flag}: --oases-core-attention sdpa does not support it; use local")
