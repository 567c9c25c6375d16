"""What is kept between operations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.oases.runtime.chunks import Chunk
from megatron.oases.runtime.collectives import InFlight
from megatron.oases.runtime.linear import DeferredGradients
from megatron.oases.runtime.pieces import PiecedGemm
from megatron.oases.runtime.rng import RngStates
from megatron.oases.schedule import Kind, Operation

# What a part is given beside the hidden states: tokens, positions, masks, rotary embeddings.
Inputs = dict[str, Tensor | None]


@dataclass(slots=True)
class Graph:
    """The two autograd graphs of one part on one sub-batch; their ends are edges, so that what is only passed through
    does not stay alive."""

    x: Tensor  # leaf: the part's input [s, b, h]
    normed: GradientEdge  # end of the graph that begins at x
    core_input: Tensor | None = None  # leaf: the norm's output
    partial: GradientEdge | None = None  # end of the graph that begins at core_input


@dataclass(slots=True)
class Cell:
    """What is kept for one (part, sub-batch)."""

    inputs: Inputs
    keep_graph: bool = False
    keep_x: bool = False  # whether x outlives the forward pass; else it is recomputed, if a backward pass follows
    outgoing: dict[Kind, Tensor] = field(default_factory=dict)  # for each collective to start: what it is to work on
    in_flight: dict[Kind, InFlight | PiecedGemm] = field(default_factory=dict)
    x: Tensor | None = None
    graph: Graph | None = None
    bias: torch.nn.Parameter | None = None
    words: GradientEdge | None = None  # end of the graph of the word embeddings
    join_graph: tuple[Tensor, GradientEdge] | None = None
    core_rng: RngStates | None = None
    join_rng: RngStates | None = None
    partial_dtype: torch.dtype | None = None
    gemm: PiecedGemm | None = None  # where a GEMM is run in pieces: the one that is next, or was last
    residual_gradient: Tensor | None = None
    chunk: Chunk | None = None  # with sub-batches along the sequence
    deferred: DeferredGradients = field(default_factory=list)


class Tape:
    """One micro-batch on its way through forward and backward.

    Args:
        cells: one for each (place in the chain, sub-batch).
        sizes: samples (with sub-batches along the sequence: positions) in each sub-batch.
        dim: the dimension of [s, b, h] that is cut.
        keep: whether a backward pass will follow.
        labels: [b, s], where the chain ends with a head.
    """

    def __init__(
        self,
        cells: dict[tuple[int, int], Cell],
        *,
        sizes: Sequence[int],
        dim: int,
        keep: bool,
        labels: Tensor | None,
    ):
        sub_batches = len(sizes)
        self.cells = cells
        self.sizes = list(sizes)
        self.dim = dim
        self.keep = keep
        self.labels = labels
        self.xs: list[Tensor | None] = [None] * sub_batches  # newest of each: [s, b_i, h] or [s_i, b, h]
        self.gradients: list[Tensor | None] = [None] * sub_batches  # newest of each
        self.logits: list[Tensor | None] = [None] * sub_batches  # [s, b_i, vocabulary/t], up to the loss
        self.loss: Tensor | None = None  # [b, s]
        self.loss_graph: tuple[Tensor, GradientEdge] | None = None  # the logits [s, b, vocabulary/t], and the loss
        self.loss_gradient: Tensor | None = None  # [b, s]
        self._runs: Counter[tuple[int, Kind]] = Counter()

    def is_last(self, operation: Operation) -> bool:
        """Whether this kind has now run for every sub-batch of the part. To be asked once for each operation."""
        self._runs[operation.place, operation.kind] += 1
        return self._runs[operation.place, operation.kind] == len(self.sizes)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """[s, b, ...] → the part of each sub-batch, contiguous."""
        return [part.contiguous() for part in whole.split(self.sizes, dim=self.dim)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of the sub-batches → [s, b, ...]."""
        return torch.cat(list(parts), dim=self.dim)
