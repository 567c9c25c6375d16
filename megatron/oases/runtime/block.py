"""Parts of the chain that are cut out of Megatron modules, with one method for each computing operation.

Vanilla autograd runs a layer's backward from end to end, collectives included. Here each part keeps two small graphs of its
own, through the core and through the norm, with the all-reduce of the gradient between them, so that a schedule can
run the pieces in its own order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.oases.runtime.cell import Cell, Graph, Inputs
from megatron.oases.runtime.chunks import ChunkedAttention
from megatron.oases.runtime.collectives import Collectives
from megatron.oases.runtime.linear import BiasGradient, LinearScheduling, accumulate
from megatron.oases.runtime.pieces import PiecedGemm
from megatron.oases.runtime.rng import RngStates
from megatron.oases.schedule import Part


class CutPart:
    """A norm, and a core that begins with a column-parallel linear.

    Args:
        norm: [s, b, h] → [s, b, h].
        core: (normed, inputs) → (this rank's output [s, b, ...], bias or None).
        linears: scheduling shared with the part's parallel linears.
        collectives: those of the ranks that share the part.
        chunked_attention: the core's attention, where sub-batches along the sequence go through it.
        pieces: into how many pieces a GEMM is cut that feeds a collective.
    """

    # Whether the core runs a collective of its own, so that it may not leave its turn.
    communicates_inside = False
    wgrad_may_move = True

    def __init__(
        self,
        *,
        norm: Callable[[Tensor], Tensor],
        core: Callable[[Tensor, Inputs], tuple[Tensor, Tensor | None]],
        linears: LinearScheduling,
        collectives: Collectives,
        chunked_attention: ChunkedAttention | None = None,
        pieces: int = 1,
    ):
        self._pieces = pieces
        self._norm = norm
        self._core = core
        self._linears = linears
        self.collectives = collectives
        self.chunked_attention = chunked_attention

    def norm(self, cell: Cell) -> Tensor:
        """NORM: the norm's output, from cell.x."""
        return self._run_norm(cell, keep_graph=cell.keep_graph)

    def core(self, cell: Cell, core_input: Tensor) -> Tensor:
        """The rest of FORWARD: this rank's output."""
        return self._run_core(cell, core_input, keep_graph=cell.keep_graph)

    def join_grad(self, cell: Cell, gradient: Tensor) -> Tensor:
        """JOIN_GRAD: the gradient of this rank's output."""
        return gradient

    def dgrad(self, cell: Cell, gradient: Tensor) -> Tensor | None:
        """The rest of DGRAD: the gradient of the core's input. The caller gets the only reference to it.

        In pieces it is left to them, and None here.
        """
        graph = cell.graph
        edges, gradients = cell.chunk.collect() if cell.chunk is not None else ((), ())
        torch.autograd.backward((graph.partial, *edges), (gradient, *gradients))
        if cell.chunk is not None:
            cell.chunk.hand_over()
        core_input_gradient, graph.core_input, graph.partial = graph.core_input.grad, None, None
        if self._pieces > 1:
            (column,) = (gradient for gradient in cell.deferred if not gradient.row_parallel)
            cell.gemm = PiecedGemm(column.grad_output, column.weight, self._pieces)
        return core_input_gradient

    def wgrad(self, cell: Cell, core_input: Tensor | None, *, is_last: bool) -> None:
        """WGRAD: adds the gradients of the column-parallel linear, and frees what they needed.

        Args:
            core_input: the norm's output, if it was gathered once more.
            is_last: whether the other sub-batches have added theirs.
        """
        if core_input is not None:
            for gradient in cell.deferred:
                if not gradient.row_parallel:
                    gradient.input = core_input
        _accumulate(cell, row_parallel=False, is_last=is_last)

    def norm_grad(self, cell: Cell, reduced: Tensor) -> Tensor:
        """NORM_GRAD: the gradient of the part's input, from the reduced gradient of the core's input."""
        graph, cell.graph = cell.graph, None
        torch.autograd.backward((graph.normed,), (reduced,))
        return graph.x.grad

    def _run_norm(self, cell: Cell, *, keep_graph: bool) -> Tensor:
        if not keep_graph:
            with torch.no_grad():
                return self._norm(cell.x)
        with torch.enable_grad():
            x = cell.x.detach().requires_grad_()
            normed = self._norm(x)
        cell.graph = Graph(x, get_gradient_edge(normed))
        return normed.detach()

    def _run_core(
        self, cell: Cell, core_input: Tensor, *, keep_graph: bool, leave_out_row_parallel: bool = False
    ) -> Tensor:
        deferred = cell.deferred if keep_graph else None

        def decompose(input_: Tensor, weight: Tensor) -> None:
            cell.gemm = PiecedGemm(input_, weight.t(), self._pieces)

        with (
            torch.set_grad_enabled(keep_graph),
            self._linears.owned(
                deferred,
                leave_out_row_parallel=leave_out_row_parallel,
                decompose=decompose if self._pieces > 1 else None,
            ),
            nullcontext() if self.chunked_attention is None else self.chunked_attention.on(cell.chunk),
        ):
            partial, cell.bias = self._core(core_input.requires_grad_(keep_graph), cell.inputs)
        if keep_graph:
            cell.graph.core_input, cell.graph.partial = core_input, get_gradient_edge(partial)
        return partial.detach()


class Block(CutPart):
    """Half a transformer layer: norm, core (column-parallel to row-parallel), bias-dropout-add.

    Args:
        part: whether it is attention or MLP, and whether backward recomputes it.
        bias_dropout_add: ((partial, bias), residual) → [s, b, h], Megatron's own function.
        is_training: tells whether the layer is in training mode.
        hidden_dropout: probability of the dropout in bias_dropout_add.
        draws_random: whether the core draws random numbers in training.
        fp32_residual: whether the residual stream is kept in fp32.
        communicates_inside: whether the core runs a collective of its own.
        recomputes_row_parallel: whether recomputation runs the row-parallel GEMM too, though no gradient needs its output.
    """

    def __init__(
        self,
        *,
        part: Part,
        bias_dropout_add: Callable[[tuple[Tensor, Tensor | None], Tensor], Tensor],
        is_training: Callable[[], bool],
        hidden_dropout: float,
        draws_random: bool,
        fp32_residual: bool,
        communicates_inside: bool,
        recomputes_row_parallel: bool,
        **cut_arguments,
    ):
        super().__init__(**cut_arguments)
        self.part = part
        self._bias_dropout_add = bias_dropout_add
        self._is_training = is_training
        self._hidden_dropout = hidden_dropout
        self._draws_random = draws_random
        self._fp32_residual = fp32_residual
        self.communicates_inside = communicates_inside
        self._recomputes_row_parallel = recomputes_row_parallel

    def core(self, cell: Cell, core_input: Tensor) -> Tensor:
        if not cell.keep_graph and self._draws_random and self._is_training():
            cell.core_rng = RngStates()
        partial = super().core(cell, core_input)
        cell.partial_dtype = partial.dtype
        return partial

    def join(self, cell: Cell, reduced: Tensor) -> Tensor:
        """JOIN: the next part's x, from the reduced output. Frees what backward does not need."""
        residual = cell.x.float() if self._fp32_residual else cell.x
        if self._hidden_dropout == 0 or not self._is_training():
            with torch.no_grad():
                x_next = self._bias_dropout_add((reduced, cell.bias), residual)
        else:
            if not cell.keep_graph:
                cell.join_rng = RngStates()
            # Not under no_grad: a compiled bias_dropout_add must be the same one that a replay will run.
            x_next, graph = self._join_with_graph(reduced, cell.bias, residual)
            cell.join_graph = graph if cell.keep_graph else None
        if cell.keep_graph:
            cell.x = None  # the graph holds it
        return x_next

    def renorm(self, cell: Cell) -> Tensor:
        """RENORM: the norm's output again, from the kept cell.x."""
        normed = self._run_norm(cell, keep_graph=True)
        cell.x = None
        return normed

    def recompute(self, cell: Cell, core_input: Tensor) -> Tensor:
        """The rest of RECOMPUTE: the core's graph again, and this rank's output, which may be without meaning."""
        leave_out = not self._recomputes_row_parallel
        with _replayed(cell.core_rng):
            partial = self._run_core(cell, core_input, keep_graph=True, leave_out_row_parallel=leave_out)
        cell.core_rng = None
        return partial

    def rejoin(self, cell: Cell, reduced: Tensor) -> Tensor:
        """REJOIN: the next part's x once more, from the reduced output."""
        x = cell.graph.x.detach()
        residual = x.float() if self._fp32_residual else x
        if cell.join_rng is None:
            with torch.no_grad():
                return self._bias_dropout_add((reduced, cell.bias), residual)
        with _replayed(cell.join_rng):
            x_next, cell.join_graph = self._join_with_graph(reduced, cell.bias, residual)
        cell.join_rng = None
        return x_next

    def join_grad(self, cell: Cell, gradient: Tensor) -> Tensor:
        """JOIN_GRAD: through residual, dropout and bias. Needs the dropout mask, but no values."""
        cell.residual_gradient = gradient
        if cell.join_rng is not None:
            with _replayed(cell.join_rng):
                stand_in = torch.zeros_like(gradient, dtype=cell.partial_dtype)
                _, cell.join_graph = self._join_with_graph(stand_in, cell.bias, torch.zeros_like(gradient))
            cell.join_rng = None
        if cell.join_graph is None:
            partial_gradient = gradient.to(cell.partial_dtype)
            if cell.bias is not None:
                cell.deferred.append(BiasGradient(cell.bias, partial_gradient))
            return partial_gradient
        (leaf, end), cell.join_graph = cell.join_graph, None
        torch.autograd.backward((end,), (gradient,))
        return leaf.grad

    def row_wgrad(self, cell: Cell, *, is_last: bool) -> None:
        """ROW_WGRAD: adds the gradients of the row-parallel linear, and frees what they needed."""
        _accumulate(cell, row_parallel=True, is_last=is_last)

    def norm_grad(self, cell: Cell, reduced: Tensor) -> Tensor:
        gradient = super().norm_grad(cell, reduced).add_(cell.residual_gradient)
        cell.residual_gradient = None
        return gradient

    def _join_with_graph(
        self, reduced: Tensor, bias: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, GradientEdge]]:
        with torch.enable_grad():
            leaf = reduced.detach().requires_grad_()
            x_next = self._bias_dropout_add((leaf, bias), residual)
        return x_next.detach(), (leaf, get_gradient_edge(x_next))


def _accumulate(cell: Cell, *, row_parallel: bool, is_last: bool) -> None:
    gradients = [gradient for gradient in cell.deferred if gradient.row_parallel is row_parallel]
    cell.deferred = [gradient for gradient in cell.deferred if gradient.row_parallel is not row_parallel]
    accumulate(gradients, is_last=is_last)


def _replayed(states: RngStates | None) -> AbstractContextManager:
    return nullcontext() if states is None else states.replayed()
