"""Cuts a GPT model into parts, and says which models can be cut."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
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
from megatron.oases.runtime.ends import Embedding, EmbeddingScheduling, Exit, Head
from megatron.oases.runtime.groups import SubGroups
from megatron.oases.runtime.linear import LinearScheduling
from megatron.oases.runtime.rng import add_sub_group_state
from megatron.oases.schedule import Part, Role

_ATTENTION_INPUTS = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def cut(
    model: GPTModel,
    chain: Sequence[Part],
    groups: SubGroups,
    *,
    along_sequence: bool,
    recomputes_row_parallel: bool,
    pieces: int,
) -> list[Embedding | Block | Head | Exit]:
    """The parts of a GPT or of its pipeline stage. The model keeps its modules, parameters and names.

    Args:
        model: the GPT or stage, with every half built at its own degree.
        chain: what its parts are.
        groups: of the blocks' degrees.
        along_sequence: whether sub-batches are cut along the sequence.
        recomputes_row_parallel: whether recomputation runs row-parallel GEMMs too.
        pieces: into how many pieces a GEMM is cut that feeds a collective.

    Raises:
        UsageError: the model has something that a schedule cannot run.
    """
    tensor = groups.collectives(1, groups.size)
    blocks = [part for part in chain if part.is_block]
    parts: list[Embedding | Block | Head | Exit] = [_embedding(model, tensor)] if model.pre_process else []
    for layer, layer_parts in zip(model.decoder.layers, zip(blocks[::2], blocks[1::2], strict=True), strict=True):
        parts += _cut_layer(
            layer,
            layer_parts,
            groups,
            along_sequence=along_sequence,
            recomputes_row_parallel=recomputes_row_parallel,
            pieces=pieces,
        )
    if model.post_process:
        parts.append(_head(model, tensor, pieces))
    elif chain[-1].role is Role.EXIT:
        parts.append(Exit())
    return parts


def _embedding(model: GPTModel, collectives: Collectives) -> Embedding:
    scheduling = EmbeddingScheduling()
    model.embedding.word_embeddings.oases_scheduling = scheduling
    return Embedding(model.embedding, scheduling, collectives)


def _head(model: GPTModel, collectives: Collectives, pieces: int) -> Head:
    scheduling = LinearScheduling()
    model.output_layer.oases_scheduling = scheduling

    def logits(normed: Tensor, _: Inputs) -> tuple[Tensor, None]:
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        return model._scale_logits(model.output_layer(normed, weight=weight)[0]), None

    return Head(
        norm=model.decoder.final_layernorm,
        core=logits,
        linears=scheduling,
        collectives=collectives,
        loss=model.compute_language_model_loss,
        pieces=pieces,
    )


def _cut_layer(
    layer: TransformerLayer,
    parts: tuple[Part, Part],
    groups: SubGroups,
    *,
    along_sequence: bool,
    **block_arguments,
) -> tuple[Block, Block]:
    """The layer's attention block and MLP block."""
    config = layer.config
    attention = _block(
        layer,
        groups,
        part=parts[0],
        norm=layer.input_layernorm,
        core=partial(_attention, layer),
        chunked_attention=ChunkedAttention(layer.self_attention.core_attention) if along_sequence else None,
        bias_dropout_add=layer.self_attn_bda,
        linears=(layer.self_attention.linear_qkv, layer.self_attention.linear_proj),
        draws_random=config.attention_dropout > 0,
        # With fewer query groups than ranks, Megatron all-gathers the queries of a group inside the attention.
        communicates_inside=config.num_query_groups * parts[0].sub_groups < groups.size,
        **block_arguments,
    )
    mlp = _block(
        layer,
        groups,
        part=parts[1],
        norm=layer.pre_mlp_layernorm,
        core=lambda normed, _: layer.mlp(normed),
        bias_dropout_add=layer.mlp_bda,
        linears=(layer.mlp.linear_fc1, layer.mlp.linear_fc2),
        draws_random=False,
        communicates_inside=False,
        **block_arguments,
    )
    return attention, mlp


def _block(
    layer: TransformerLayer, groups: SubGroups, *, part: Part, bias_dropout_add, linears, **block_arguments
) -> Block:
    scheduling = LinearScheduling()
    for linear in linears:
        linear.oases_scheduling = scheduling
    config, degree = layer.config, groups.size // part.sub_groups
    # With sequence parallelism every rank draws by itself.
    draws_alike = part.sub_groups > 1 and layer.hidden_dropout > 0 and not config.sequence_parallel
    rng = add_sub_group_state(degree, groups.rank // degree) if draws_alike else None
    return Block(
        part=part,
        bias_dropout_add=partial(_bias_dropout_add, layer, bias_dropout_add, rng),
        linears=scheduling,
        collectives=groups.collectives(1, degree),
        is_training=lambda: layer.training,
        hidden_dropout=layer.hidden_dropout,
        fp32_residual=config.fp32_residual_connection,
        **block_arguments,
    )


def _attention(layer: TransformerLayer, normed: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    return layer.self_attention(normed, **{name: inputs[name] for name in _ATTENTION_INPUTS})


def _bias_dropout_add(
    layer: TransformerLayer, module, rng: str | None, partial_and_bias, residual: Tensor
) -> Tensor:
    with _drawing_from(rng if layer.training else None):
        function = module(layer.training, layer.config.bias_dropout_fusion)
        return function(partial_and_bias, residual, layer.hidden_dropout)


def _drawing_from(rng: str | None) -> AbstractContextManager:
    return nullcontext() if rng is None else get_cuda_rng_tracker().fork(rng)


def check_layer(layer: TransformerLayer) -> None:
    """Raises `UsageError` for a layer that cannot be cut."""

    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"--oases-schedule: layer {layer.layer_number} {what}; {instead}")

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
