"""Cuts a GPT model into parts, and says which models can be cut."""

from functools import partial

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.oases.errors import UsageError
from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Inputs
from megatron.oases.runtime.chunks import ChunkedAttention
from megatron.oases.runtime.collectives import Collectives
from megatron.oases.runtime.ends import Embedding, EmbeddingScheduling, Head
from megatron.oases.runtime.linear import LinearScheduling
from megatron.oases.schedule import Idea, Part, build_chain

_ATTENTION_INPUTS = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def cut(
    model: GPTModel, collectives: Collectives, *, along_sequence: bool, without: frozenset[Idea]
) -> list[Embedding | Block | Head]:
    """The parts of a GPT or of its pipeline stage. The model keeps its modules, parameters and names.

    Args:
        model: the GPT or stage.
        collectives: those of the tensor-parallel group.
        along_sequence: whether sub-batches are cut along the sequence.
        without: ideas of the schedule to leave out.

    Raises:
        UsageError: the model has something that a schedule cannot run.
    """
    chain = _chain(model, keeps_last_layer=Idea.KEEP_LAST_LAYER not in without)
    blocks = [part for part in chain if part.is_block]
    parts: list[Embedding | Block | Head] = [_embedding(model, collectives)] if model.pre_process else []
    for layer, layer_parts in zip(model.decoder.layers, zip(blocks[::2], blocks[1::2], strict=True), strict=True):
        parts += _cut_layer(
            layer,
            layer_parts,
            along_sequence=along_sequence,
            recomputes_row_parallel=Idea.RECOMPUTE_WITHOUT_GEMM in without,
        )
    if model.post_process:
        parts.append(_head(model))
    return parts


def _embedding(model: GPTModel, collectives: Collectives) -> Embedding:
    scheduling = EmbeddingScheduling()
    model.embedding.word_embeddings.oases_scheduling = scheduling
    return Embedding(model.embedding, scheduling, collectives)


def _head(model: GPTModel) -> Head:
    scheduling = LinearScheduling()
    model.output_layer.oases_scheduling = scheduling

    def logits(normed: Tensor, _: Inputs) -> tuple[Tensor, None]:
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        return model._scale_logits(model.output_layer(normed, weight=weight)[0]), None

    return Head(
        norm=model.decoder.final_layernorm, core=logits, linears=scheduling, loss=model.compute_language_model_loss
    )


def _cut_layer(
    layer: TransformerLayer, parts: tuple[Part, Part], *, along_sequence: bool, recomputes_row_parallel: bool
) -> tuple[Block, Block]:
    """The layer's attention block and MLP block."""
    _check(layer)
    config = layer.config
    attention = _block(
        layer,
        part=parts[0],
        norm=layer.input_layernorm,
        core=partial(_attention, layer),
        chunked_attention=ChunkedAttention(layer.self_attention.core_attention) if along_sequence else None,
        bias_dropout_add=layer.self_attn_bda,
        linears=(layer.self_attention.linear_qkv, layer.self_attention.linear_proj),
        draws_random=config.attention_dropout > 0,
        # With fewer query groups than ranks, Megatron all-gathers the queries of a group inside the attention.
        communicates_inside=config.num_query_groups < layer.tp_group.size(),
        recomputes_row_parallel=recomputes_row_parallel,
    )
    mlp = _block(
        layer,
        part=parts[1],
        norm=layer.pre_mlp_layernorm,
        core=lambda normed, _: layer.mlp(normed),
        bias_dropout_add=layer.mlp_bda,
        linears=(layer.mlp.linear_fc1, layer.mlp.linear_fc2),
        draws_random=False,
        communicates_inside=False,
        recomputes_row_parallel=recomputes_row_parallel,
    )
    return attention, mlp


def _chain(model: GPTModel, *, keeps_last_layer: bool) -> tuple[Part, ...]:
    """Which blocks Megatron's flags ask to recompute."""
    config, layers = model.config, len(model.decoder.layers)
    match config.recompute_granularity:
        case None | "selective":
            recomputed = 0
        case "full":
            recomputed = layers if config.recompute_method == "uniform" else min(config.recompute_num_layers, layers)
        case other:
            raise UsageError(f"--recompute-granularity {other}: the oases schedule knows full and selective")
    return build_chain(
        layers=layers,
        recomputed_layers=recomputed,
        recomputes_mlps=config.recompute_granularity == "selective" and "mlp" in config.recompute_modules,
        embedding=model.pre_process,
        head=model.post_process,
        keeps_last_layer=keeps_last_layer,
    )


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


def _attention(layer: TransformerLayer, normed: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    return layer.self_attention(normed, **{name: inputs[name] for name in _ATTENTION_INPUTS})


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
