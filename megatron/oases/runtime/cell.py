"""What is kept between operations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.oases.runtime.collectives import InFlight
from megatron.oases.runtime.linear import DeferredGradients
from megatron.oases.runtime.rng import RngStates

# What a part is given beside the hidden states: tokens, positions, masks, rotary embeddings.
Inputs = dict[str, Tensor | None]


@dataclass(slots=True)
class Graph:
    """The two autograd graphs of one part on one sub-batch. Tensors are [s, b, h]."""

    x: Tensor  # leaf: the part's input
    normed: GradientEdge  # end of the graph that begins at x
    core_input: Tensor  # leaf: the norm's output, detached
    partial: GradientEdge  # end of the graph that begins at core_input


@dataclass(slots=True)
class Cell:
    """What is kept for one (part, sub-batch)."""

    inputs: Inputs
    keep_graph: bool = False
    x: Tensor | None = None
    partial: Tensor | None = None  # not reduced yet: the output, or the gradient of the core's input
    in_flight: InFlight | None = None
    bias: torch.nn.Parameter | None = None
    words: GradientEdge | None = None  # end of the graph of the word embeddings
    core_rng: RngStates | None = None
    join_rng: RngStates | None = None
    join_graph: tuple[Tensor, GradientEdge] | None = None
    graph: Graph | None = None
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
        self.loss: Tensor | None = None  # [b, s]
        self.loss_graph: tuple[list[Tensor], GradientEdge] | None = None  # the logits' leaves, and the loss
        self.loss_gradient: Tensor | None = None  # [b, s]
