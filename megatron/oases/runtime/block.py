"""A block: half a Megatron layer, cut where its collectives are, with one method for each computing operation.

Vanilla autograd runs a layer's backward from end to end, collectives included. Here each block keeps two small graphs of
its own, through the core and through the norm, with the all-reduce of the gradient between them, so that a schedule can
run the pieces in its own order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.oases.runtime.linear import BiasGradient, DeferredGradients, LinearScheduling
from megatron.oases.runtime.rng import RngStates


@dataclass(slots=True)
class Graph:
    """The two autograd graphs of one block on one sub-batch. Tensors are [s, b, h]."""

    x: Tensor  # leaf: the block's input
    normed: GradientEdge  # end of the graph that begins at x
    core_input: Tensor  # leaf: the norm's output, detached
    partial: GradientEdge  # end of the graph that begins at core_input


@dataclass(slots=True)
class Cell:
    """What is kept for one (block, sub-batch) between its operations."""

    inputs: dict[str, Tensor | None]  # the layer's other inputs: masks, rotary embeddings
    x: Tensor | None = None
    partial: Tensor | None = None
    bias: torch.nn.Parameter | None = None
    core_rng: RngStates | None = None
    join_rng: RngStates | None = None
    join_graph: tuple[Tensor, GradientEdge] | None = None
    graph: Graph | None = None
    residual_gradient: Tensor | None = None
    deferred: DeferredGradients = field(default_factory=list)


class Block:
    """Half a transformer layer: norm, core (column-parallel to row-parallel), bias-dropout-add.

    Args:
        norm: [s, b, h] → [s, b, h].
        core: (normed, inputs) → (partial output [s, b, h], bias [h] or None).
        bias_dropout_add: ((partial, bias), residual) → [s, b, h], Megatron's own function.
        linears: scheduling shared with the block's parallel linears.
        is_training: tells whether the layer is in training mode.
        hidden_dropout: probability of the dropout in bias_dropout_add.
        draws_random: whether the core draws random numbers in training.
        fp32_residual: whether the residual stream is kept in fp32.
        communicates_inside: whether the core runs a collective of its own, so that it may not leave its turn.
    """

    def __init__(
        self,
        *,
        norm: Callable[[Tensor], Tensor],
        core: Callable[[Tensor, dict[str, Tensor | None]], tuple[Tensor, Tensor | None]],
        bias_dropout_add: Callable[[tuple[Tensor, Tensor | None], Tensor], Tensor],
        linears: LinearScheduling,
        is_training: Callable[[], bool],
        hidden_dropout: float,
        draws_random: bool,
        fp32_residual: bool,
        communicates_inside: bool,
    ):
        self._norm = norm
        self._core = core
        self._bias_dropout_add = bias_dropout_add
        self._linears = linears
        self._is_training = is_training
        self._hidden_dropout = hidden_dropout
        self._draws_random = draws_random
        self._fp32_residual = fp32_residual
        self.communicates_inside = communicates_inside

    @property
    def _drops_hidden(self) -> bool:
        return self._hidden_dropout > 0 and self._is_training()

    def forward(self, cell: Cell, *, keep_graph: bool) -> None:
        """FORWARD: from cell.x to cell.partial."""
        if keep_graph:
            cell.partial = self._build_graph(cell, leave_out_row_parallel=False)
            return
        if self._draws_random and self._is_training():
            cell.core_rng = RngStates()
        with torch.no_grad(), self._linears.owned():
            cell.partial, cell.bias = self._core(self._norm(cell.x), cell.inputs)

    def join(self, cell: Cell, reduced: Tensor, *, keep_graph: bool) -> Tensor:
        """JOIN: the next block's x, from the reduced output. Frees what backward does not need."""
        residual = cell.x.float() if self._fp32_residual else cell.x
        if not self._drops_hidden:
            with torch.no_grad():
                x_next = self._bias_dropout_add((reduced, cell.bias), residual)
        elif keep_graph:
            x_next, cell.join_graph = self._join_with_graph(reduced, cell.bias, residual)
        else:
            # Not under no_grad: a compiled bias_dropout_add must be the same one that the replay will run.
            cell.join_rng = RngStates()
            x_next, _ = self._join_with_graph(reduced, cell.bias, residual)
        cell.partial = None
        return x_next

    def recompute(self, cell: Cell) -> None:
        """RECOMPUTE: the graphs again from cell.x, without the row-parallel GEMM."""
        if cell.core_rng is None:
            self._build_graph(cell, leave_out_row_parallel=True)
        else:
            with cell.core_rng.replayed():
                self._build_graph(cell, leave_out_row_parallel=True)
            cell.core_rng = None
        cell.x = None

    def dgrad(self, cell: Cell, gradient: Tensor) -> Tensor:
        """DGRAD: from the gradient of the block's output to that of the core's input, this rank's part of the sum."""
        partial_gradient = self._join_gradient(cell, gradient)
        cell.residual_gradient = gradient
        graph = cell.graph
        torch.autograd.backward((graph.partial,), (partial_gradient,))
        # The caller holds the only reference: the collective reduces it in place.
        core_input_gradient, graph.core_input = graph.core_input.grad, None
        return core_input_gradient

    def wgrad(self, cell: Cell) -> None:
        """WGRAD: adds the gradients of the block's linears, and frees what they needed."""
        deferred, cell.deferred = cell.deferred, []
        for gradient in deferred:
            gradient.accumulate()

    def norm_grad(self, cell: Cell, reduced: Tensor) -> Tensor:
        """NORM_GRAD: the gradient of the block's input, from the reduced gradient of the core's input."""
        graph, cell.graph = cell.graph, None
        torch.autograd.backward((graph.normed,), (reduced,))
        gradient = graph.x.grad.add_(cell.residual_gradient)
        cell.residual_gradient = None
        return gradient

    def _build_graph(self, cell: Cell, *, leave_out_row_parallel: bool) -> Tensor:
        with (
            torch.enable_grad(),
            self._linears.owned(cell.deferred, leave_out_row_parallel=leave_out_row_parallel),
        ):
            x = cell.x.detach().requires_grad_()
            normed = self._norm(x)
            core_input = normed.detach().requires_grad_()
            partial, cell.bias = self._core(core_input, cell.inputs)
        # Edges, not tensors: the storage of what is only passed through must not stay alive.
        cell.graph = Graph(x, get_gradient_edge(normed), core_input, get_gradient_edge(partial))
        return partial.detach()

    def _join_with_graph(
        self, reduced: Tensor, bias: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, GradientEdge]]:
        with torch.enable_grad():
            leaf = reduced.detach().requires_grad_()
            x_next = self._bias_dropout_add((leaf, bias), residual)
        return x_next.detach(), (leaf, get_gradient_edge(x_next))

    def _join_gradient(self, cell: Cell, gradient: Tensor) -> Tensor:
        """Through residual, dropout and bias: needs the dropout mask, but no values."""
        if cell.join_rng is not None:
            with cell.join_rng.replayed():
                stand_in = gradient.new_zeros(gradient.shape, dtype=cell.graph.core_input.dtype)
                _, cell.join_graph = self._join_with_graph(stand_in, cell.bias, torch.zeros_like(gradient))
            cell.join_rng = None
        if cell.join_graph is None:
            partial_gradient = gradient.to(cell.graph.core_input.dtype)
            if cell.bias is not None:
                cell.deferred.append(BiasGradient(cell.bias, partial_gradient))
            return partial_gradient
        (leaf, end), cell.join_graph = cell.join_graph, None
        torch.autograd.backward((end,), (gradient,))
        return leaf.grad
