"""What is trained and how it is laid out over devices, taken from Megatron's flags. Pure: no model is built."""

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Literal

from megatron.oases.cost.model import Group
from megatron.oases.schedule import Part, Role, build_chain, enclose
from megatron.oases.sizes import sub_batch_sizes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A GPT. Numbers are of the whole model.

    Args:
        padded_vocabulary: after Megatron's padding to a multiple of the TP degree.
        ffn_hidden_size: width of the MLP; a gated MLP has two such column-parallel halves.
        query_groups: key and value heads; as many as heads without grouped queries.
        head_size: width of one head.
        stores_scores: whether core attention writes its scores [b, heads, s, s] to memory and keeps them.
        element_bytes: of a parameter and an activation in forward and backward.
    """

    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    query_groups: int
    head_size: int
    sequence: int
    padded_vocabulary: int
    gated_mlp: bool
    bias: bool
    tied_embeddings: bool
    learned_positions: bool
    rms_norm: bool
    stores_scores: bool
    element_bytes: int

    @classmethod
    def from_args(cls, args: Namespace) -> "ModelShape":
        """From Megatron's parsed and validated arguments."""
        half = args.fp16 or args.bf16
        flash = args.transformer_impl != "local" or getattr(args, "oases_core_attention", "local") != "local"
        return cls(
            layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            heads=args.num_attention_heads,
            query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            head_size=args.kv_channels,
            sequence=args.seq_length,
            padded_vocabulary=args.padded_vocab_size,
            gated_mlp=args.swiglu,
            bias=args.add_bias_linear,
            tied_embeddings=not args.untie_embeddings_and_output_weights,
            learned_positions=args.position_embedding_type == "learned_absolute",
            rms_norm=args.normalization == "RMSNorm",
            stores_scores=not flash,
            element_bytes=2 if half else 4,
        )

    @property
    def qkv_width(self) -> int:
        """Rows of the linear that makes queries, keys and values."""
        return self.head_size * (self.heads + 2 * self.query_groups)

    @property
    def column_width(self) -> int:
        """Rows of the MLP's first linear."""
        return self.ffn_hidden_size * (2 if self.gated_mlp else 1)

    def parameters(self, role: Role, *, degree: int = 1) -> int:
        """Parameters of one part that one rank holds at TP degree `degree`. Tied weights count with the embedding."""
        h, norm = self.hidden_size, self.hidden_size * (1 if self.rms_norm else 2)
        match role:
            case Role.ATTENTION:
                attention = self.head_size * self.heads
                sharded = self.qkv_width * h + attention * h + self.bias * self.qkv_width
                return sharded // degree + self.bias * h + norm
            case Role.MLP:
                sharded = self.column_width * h + self.ffn_hidden_size * h + self.bias * self.column_width
                return sharded // degree + self.bias * h + norm
            case Role.EMBEDDING:
                positions = self.sequence * h if self.learned_positions else 0
                return self.padded_vocabulary * h // degree + positions
            case Role.HEAD:
                return (0 if self.tied_embeddings else self.padded_vocabulary * h // degree) + norm
            case Role.EXIT:
                return 0
        raise AssertionError(role)

    def replicated_parameters(self, role: Role) -> int:
        """Those of a part's parameters whose gradients Megatron sums over the tensor-parallel group, with sequence
        parallelism: each rank has seen its part of the sequence only."""
        of_norm = self.hidden_size * (1 if self.rms_norm else 2)
        of_bias = self.hidden_size * self.bias  # of the row-parallel linear
        return {Role.EMBEDDING: 0, Role.EXIT: 0, Role.HEAD: of_norm}.get(role, of_norm + of_bias)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training iteration: a model, its layout over `tensor · pipeline · data` devices, and how it is recomputed.

    Args:
        micro_batch: samples of a micro-batch.
        micro_batches: of one pipeline, in an iteration.
        recompute: `full`: every layer; `block`: the first `recompute_layers` of a stage; `none`.
        degrees: TP degree of every block of all stages (attention, MLP, attention, …), divisors of `tensor`. Empty: all
            have that.
        recomputed: whether each of these blocks is recomputed. None: as `recompute` says.
        sub_batches: how many a micro-batch is cut into.
        pieces: how many a GEMM is cut into that feeds a collective.
        gradient_bytes: of a parameter in Megatron's gradient buffer.
        hidden_dropout: whether there is any between blocks.
        attention_dropout: whether there is any on attention's scores.
        unfused: whether RMSNorm and gated activations are computed in pieces that each keep something, as on the CPU.
    """

    model: ModelShape
    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    micro_batches: int
    recompute: Literal["none", "full", "block"]
    recompute_layers: int = 0
    degrees: tuple[int, ...] = ()
    recomputed: tuple[bool, ...] | None = None
    sub_batches: int = 1
    pieces: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gradient_bytes: int = 4
    hidden_dropout: bool = False
    attention_dropout: bool = False
    unfused: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tokens(self) -> int:
        """Of an iteration, over all pipelines."""
        return self.model.sequence * self.micro_batch * self.micro_batches * self.data

    @property
    def tensor_group(self) -> Group:
        return Group(self.tensor)

    @property
    def data_group(self) -> Group:
        return Group(self.data, stride=self.tensor)

    @property
    def pipeline_group(self) -> Group:
        """Megatron's order of ranks: tensor, then data, then pipeline."""
        return Group(self.pipeline, stride=self.tensor * self.data)

    def hidden_bytes(self, samples: int) -> int:
        """Of a tensor [s, b, h] of that many samples."""
        return self.model.sequence * samples * self.model.hidden_size * self.model.element_bytes

    def sub_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each sub-batch; the first ones are larger where it does not divide."""
        return sub_batch_sizes(self.micro_batch, self.sub_batches)

    def chain(self, stage: int, *, keeps_last_layer: bool) -> tuple[Part, ...]:
        """The parts of pipeline stage `stage`; see `build_chain`."""
        layers = self.model.layers // self.pipeline
        ends = {"embedding": stage == 0, "head": stage == self.pipeline - 1}
        chain = build_chain(
            layers=layers,
            recomputed_layers={"none": 0, "full": layers, "block": min(self.recompute_layers, layers)}[self.recompute],
            keeps_last_layer=keeps_last_layer,
            **ends,
        )
        own = slice(2 * layers * stage, 2 * layers * (stage + 1))
        blocks = [part for part in chain if part.is_block]
        if self.recomputed is not None:
            blocks = [replace(part, recomputed=each) for part, each in zip(blocks, self.recomputed[own], strict=True)]
        if self.degrees:
            counts = [self.tensor // degree for degree in self.degrees[own]]
            blocks = [replace(part, sub_groups=count) for part, count in zip(blocks, counts, strict=True)]
        return enclose(blocks, **ends)

    def degree_of(self, part: Part) -> int:
        """Its TP degree."""
        return self.tensor // part.sub_groups
