"""Patches the model's forward (megatron.core.models.gpt.gpt_model).

What: `GPTModel.forward` runs under the schedule that was attached to the model (`oases_stage`), from tokens to the loss of every
    token. It is Megatron's own for every other model, and where logits are asked for instead of a loss.
Why: Megatron runs embedding, layers, head and loss one after the other, each from end to end.
Versions: megatron-core 0.19.
Can go: when GPTModel takes a callable that runs its parts.
"""

import functools

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from oases_patches.patching import Replacement

_ROTARY = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def _scheduled(original):
    @functools.wraps(original)
    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, **kwargs) -> Tensor:
        stage = getattr(self, "oases_stage", None)
        wants_logits = self.post_process and labels is None
        if stage is None or (wants_logits and not torch.is_grad_enabled()):
            return original(self, input_ids, position_ids, attention_mask, decoder_input, labels, **kwargs)
        if wants_logits or decoder_input is not None:
            raise ValueError("under the schedule a model is trained from tokens to loss: give labels, not decoder_input")
        kwargs.pop("loss_mask", None)  # only multi-token prediction reads it
        for name, value in kwargs.items():
            assert value is None, f"the schedule does not run with {name}"
        hidden_states = None if self.pre_process else self.decoder.input_tensor
        inputs = {"tokens": input_ids, "positions": position_ids, "attention_mask": attention_mask}
        inputs.update(zip(_ROTARY, _rotary(self, input_ids, hidden_states), strict=True))
        return stage(hidden_states=hidden_states, inputs=inputs, labels=labels)

    return forward


def _rotary(model: GPTModel, input_ids: Tensor | None, hidden_states: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rotary embeddings by Megatron's own code, which reads no more of the decoder's input than its length."""
    if hidden_states is None:
        length = input_ids.shape[1]
        if model.config.sequence_parallel:
            length //= model.config.tensor_model_parallel_size
        hidden_states = input_ids.new_empty((length, 0))
    return model._preprocess(input_ids=None, position_ids=None, decoder_input=hidden_states)[1:4]


_replacement = Replacement(GPTModel, "forward", _scheduled)
apply, revert = _replacement.apply, _replacement.revert
