"""Patches the decoder's forward (megatron.core.transformer.transformer_block).

What: `TransformerBlock.forward` runs its layers under the schedule that was attached to it (`oases_scheduled`), and is
    Megatron's own for every other decoder, and for inference.
Why: Megatron runs its layers one after the other, each from end to end.
Versions: megatron-core 0.19.
Can go: when TransformerBlock takes a callable that runs its layers.
"""

import functools

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from oases_patches.patching import Replacement

_FOR_ATTENTION = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "attention_bias")
_UNSUPPORTED = ("context", "context_mask", "packed_seq_params", "extract_layer_indices")


def _scheduled(original):
    @functools.wraps(original)
    def forward(self, hidden_states, attention_mask, **kwargs) -> Tensor:
        scheduled = getattr(self, "oases_scheduled", None)
        if scheduled is None or kwargs.get("inference_context") is not None:
            return original(self, hidden_states, attention_mask, **kwargs)
        for name in _UNSUPPORTED:
            assert kwargs.get(name) is None, f"the schedule does not run with {name}"
        inputs = {name: kwargs[name] for name in _FOR_ATTENTION if kwargs.get(name) is not None}
        inputs["attention_mask"] = attention_mask
        hidden_states = scheduled(hidden_states if self.pre_process else self.input_tensor, inputs)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
            hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return hidden_states

    return forward


_replacement = Replacement(TransformerBlock, "forward", _scheduled)
apply, revert = _replacement.apply, _replacement.revert
