"""Cuts Megatron's transformer layers into blocks, and says which layers can be cut."""

from functools import partial

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.oases.errors import UsageError
from megatron.oases.runtime.block import Block
from megatron.oases.runtime.linear import LinearScheduling


def cut(layer: TransformerLayer) -> tuple[Block, Block]:
    """The layer's attention block and MLP block. The layer itself, its modules and parameters stay as they are.

    Raises:
        UsageError: the layer is not one that a schedule can run.
    """
    _check(layer)
    config = layer.config
    attention = _block(
        layer,
        norm=layer.input_layernorm,
        core=lambda normed, inputs: layer.self_attention(normed, **inputs),
        bias_dropout_add=layer.self_attn_bda,
        linears=(layer.self_attention.linear_qkv, layer.self_attention.linear_proj),
        draws_random=config.attention_dropout > 0,
        # With fewer query groups than ranks, Megatron all-gathers the queries of a group inside the attention.
        communicates_inside=config.num_query_groups < layer.tp_group.size(),
    )
    mlp = _block(
        layer,
        norm=layer.pre_mlp_layernorm,
        core=lambda normed, _: layer.mlp(normed),
        bias_dropout_add=layer.mlp_bda,
        linears=(layer.mlp.linear_fc1, layer.mlp.linear_fc2),
        draws_random=False,
        communicates_inside=False,
    )
    return attention, mlp


def recomputed_blocks(config: TransformerConfig, num_layers: int) -> tuple[bool, ...]:
    """For each block of `num_layers` layers, whether Megatron's recomputation flags ask to recompute all of it."""
    match config.recompute_granularity:
        case None:
            layers = [(False, False)] * num_layers
        case "selective":
            layers = [(False, "mlp" in config.recompute_modules)] * num_layers
        case "full" if config.recompute_method == "block":
            layers = [(i < config.recompute_num_layers,) * 2 for i in range(num_layers)]
        case "full":
            layers = [(True, True)] * num_layers
        case other:
            raise UsageError(f"--recompute-granularity {other}: the oases schedule knows full and selective")
    return tuple(recompute for layer in layers for recompute in layer)


def _block(layer: TransformerLayer, *, bias_dropout_add, linears, **block_arguments) -> Block:
    scheduling = LinearScheduling()
    for linear in linears:
        linear.oases_scheduling = scheduling
    config = layer.config
    return Block(
        bias_dropout_add=partial(_bias_dropout_add, layer, bias_dropout_add),
        linears=scheduling,
        is_training=lambda: layer.training,
        hidden_dropout=layer.hidden_dropout,
        fp32_residual=config.fp32_residual_connection,
        **block_arguments,
    )


def _bias_dropout_add(layer: TransformerLayer, module, partial_and_bias, residual: Tensor) -> Tensor:
    return module(layer.training, layer.config.bias_dropout_fusion)(partial_and_bias, residual, layer.hidden_dropout)


def _check(layer: TransformerLayer) -> None:
    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"--oases-schedule oases: layer {layer.layer_number} {what}; {instead}")

    if type(layer) is not TransformerLayer or not isinstance(layer.cross_attention, IdentityOp):
        refuse(f"is a {type(layer).__name__}, not a plain decoder layer", "use --oases-schedule vanilla")
    if not isinstance(layer.cross_attn_bda, IdentityFuncOp):
        refuse("has cross-attention", "use --oases-schedule vanilla")
    attention, mlp = layer.self_attention, layer.mlp
    if not isinstance(attention, SelfAttention) or not isinstance(mlp, MLP):
        refuse(
            f"has {type(attention).__name__} and {type(mlp).__name__}, not SelfAttention and MLP",
            "use --oases-schedule vanilla",
        )
    if isinstance(layer.input_layernorm, IdentityOp) or isinstance(layer.pre_mlp_layernorm, IdentityOp):
        refuse("has its norm fused into a linear", "use --transformer-impl local")
    for column in (attention.linear_qkv, mlp.linear_fc1):
        if not isinstance(column, ColumnParallelLinear):
            refuse(f"has a {type(column).__name__}", "use --transformer-impl local")
    for row in (attention.linear_proj, mlp.linear_fc2):
        if not isinstance(row, RowParallelLinear):
            refuse(f"has a {type(row).__name__}", "use --transformer-impl local")
    if layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm:
        refuse("recomputes its norms", "leave layernorm out of --recompute-modules")
