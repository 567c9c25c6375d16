"""What is kept between operations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.oases.runtime.collectives import InFlight
from megatron.oases.runtime.linear import DeferredGradients
from megatron.oases.runtime.rng import RngStates
from megatron.oases.schedule import Kind

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
    outgoing: dict[Kind, Tensor] = field(default_factory=dict)  # for each collective to start: what it is to work on
    in_flight: dict[Kind, InFlight] = field(default_factory=dict)
    x: Tensor | None = None
    graph: Graph | None = None
    bias: torch.nn.Parameter | None = None
    words: GradientEdge | None = None  # end of the graph of the word embeddings
    join_graph: tuple[Tensor, GradientEdge] | None = None
    core_rng: RngStates | None = None
    join_rng: RngStates | None = None
    partial_dtype: torch.dtype | None = None
    residual_gradient: Tensor | None = None
    deferred: DeferredGradients = field(default_factory=list)


class Tape:
    """One micro-batch on its way through forward and backward.

    Args:
        cells: one for each (place in the chain, sub-batch).
        batch_sizes: samples in each sub-batch.
        keep: whether a backward pass will follow.
        labels: [b, s], where the chain ends with a head.
        xs: input of the first block for each sub-batch [s, b_i, h], where the chain begins without an embedding.
    """

    def __init__(
        self,
        cells: dict[tuple[int, int], Cell],
        *,
        batch_sizes: Sequence[int],
        keep: bool,
        labels: Tensor | None,
        xs: Sequence[Tensor] | None,
    ):
        sub_batches = len(batch_sizes)
        self.cells = cells
        self.batch_sizes = list(batch_sizes)
        self.keep = keep
        self.labels = labels
        self.xs: list[Tensor | None] = list(xs) if xs is not None else [None] * sub_batches  # newest of each
        self.gradients: list[Tensor | None] = [None] * sub_batches  # newest of each
        self.logits: list[Tensor | None] = [None] * sub_batches  # [s, b_i, vocabulary/t], up to the loss
        self.loss: Tensor | None = None  # [b, s]
        self.loss_graph: tuple[Tensor, GradientEdge] | None = None  # the logits [s, b, vocabulary/t], and the loss
        self.loss_gradient: Tensor | None = None  # [b, s]
