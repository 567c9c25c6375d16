"""Megatron's arguments that change which kernels run, beside the model's shape and its layout.

A profile holds for one value of each. Who makes the layers (`--transformer-impl`) is not among them: it differs between
the systems that are compared, and a profile has them all.
"""

from argparse import Namespace

_NAMES = (
    "accumulate_allreduce_grads_in_fp32",
    "activation_func_clamp_value",
    "add_qkv_bias",
    "apply_residual_connection_post_layernorm",
    "apply_rope_fusion",
    "attention_output_gate",
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "cross_entropy_fusion_impl",
    "cross_entropy_loss_fusion",
    "deterministic_mode",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp16_lm_cross_entropy",
    "fp32_residual_connection",
    "fused_residual_rmsnorm",
    "glu_linear_offset",
    "gradient_accumulation_fusion",
    "layernorm_zero_centered_gamma",
    "main_grads_dtype",
    "main_params_dtype",
    "masked_softmax_fusion",
    "no_rope_freq",
    "normalization",
    "openai_gelu",
    "optimizer",
    "params_dtype",
    "position_embedding_type",
    "qk_l2_norm",
    "qk_layernorm",
    "quick_geglu",
    "rotary_interleaved",
    "rotary_percent",
    "softmax_type",
    "squared_relu",
    "swiglu",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
    "window_attn_skip_freq",
    "window_size",
)


def options_of(args: Namespace) -> dict[str, str]:
    """Their values as text, by name, from Megatron's validated arguments."""
    return {
        **{name: str(getattr(args, name, None)) for name in _NAMES},
        # Of these the size or the rest does not matter.
        "clip_grad above 0": str(args.clip_grad > 0),
        "recompute_granularity selective": str(args.recompute_granularity == "selective"),
    }
