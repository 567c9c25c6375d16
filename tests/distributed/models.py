"""Small GPT models for the distributed tests, and one step of them."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A GPT, small and odd-sized on purpose. `config` goes to Megatron's TransformerConfig."""

    layers: int = 3
    hidden: int = 24
    heads: int = 4
    sequence: int = 10
    batch: int = 4
    vocabulary: int = 64
    rope: bool = False
    rmsnorm: bool = False
    tied: bool = True
    masked: bool = False
    sdpa: bool = False
    config: dict[str, Any] = field(default_factory=dict)


def build(case: ModelCase, seed: int = 17):
    """Builds the model of `case`, equal for equal seeds, on the default tensor-parallel groups."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    from megatron.core import parallel_state

    from megatron.oases.runtime.core_attention import with_core_attention
    from oases_patches import torch_norm

    torch_norm.apply()

    settings = dict(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm" if case.rmsnorm else "LayerNorm",
    )
    config = TransformerConfig(**{**settings, **case.config})
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(
        config=config,
        transformer_layer_spec=with_core_attention(spec, "sdpa") if case.sdpa else spec,
        vocab_size=case.vocabulary,
        max_sequence_length=case.sequence,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope" if case.rope else "learned_absolute",
    )
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


def batch(case: ModelCase, seed: int = 5) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, case.vocabulary, (case.batch, case.sequence + 1), generator=generator)
    mask = None
    if case.masked:  # True: hidden. Causal, and each sample hides other positions besides.
        causal = torch.ones(case.sequence, case.sequence).triu(1).bool()
        hidden = torch.rand(case.batch, 1, case.sequence, case.sequence, generator=generator) < 0.2
        mask = causal | (hidden & ~torch.eye(case.sequence).bool())
    return dict(
        input_ids=tokens[:, :-1].contiguous(),
        position_ids=torch.arange(case.sequence).expand(case.batch, -1).contiguous(),
        attention_mask=mask,
        labels=tokens[:, 1:].contiguous(),
    )


def step(model, inputs: dict[str, torch.Tensor | None]) -> tuple[float, dict[str, torch.Tensor]]:
    """One forward and backward; returns the mean loss and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).float().mean()
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return loss.item(), gradients


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    """Every gradient equal to rounding, relative to the largest entry of that gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, f"{name}: the gradient is zero, the comparison would prove nothing"
        difference = (actual[name] - gradient).abs().max().item()
        assert difference <= tolerance * scale, f"{name}: differs by {difference:.3e} of {scale:.3e}"
