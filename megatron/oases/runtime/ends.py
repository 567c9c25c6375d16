"""The ends of the chain: the embedding and the head, cut where their collectives are, and the end of a stage."""

from collections.abc import Callable

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.oases.runtime.block import CutPart
from megatron.oases.runtime.cell import Cell, Tape
from megatron.oases.runtime.collectives import Collectives
from megatron.oases.schedule import Part, Role


class EmbeddingScheduling:
    """Shared with the vocabulary-parallel embedding: which half of its forward a schedule wants now.

    Outside both halves the embedding is vanilla Megatron. `answer` is what it returns without looking anything up.
    """

    def __init__(self):
        self.active = False
        self.answer: Tensor | None = None


class Embedding:
    """Word embeddings over the tensor-parallel vocabulary, positions, dropout.

    Args:
        module: Megatron's embedding. Its own code runs, in two halves round the collective.
        scheduling: shared with its vocabulary-parallel embedding.
        collectives: those of the tensor-parallel group.
    """

    # With sequence parallelism WGRAD gathers the gradient, here or, with learned positions, inside Megatron's backward.
    part = Part(Role.EMBEDDING)
    chunked_attention = None
    communicates_inside = True
    wgrad_may_move = False

    def __init__(self, module: LanguageModelEmbedding, scheduling: EmbeddingScheduling, collectives: Collectives):
        self._module = module
        self._scheduling = scheduling
        self.collectives = collectives
        self.scatters = module.reduce_scatter_embeddings

    def lookup(self, cell: Cell) -> Tensor:
        """FORWARD: this rank's share of the word embeddings, [b, s, h], or [s, b, h] where it will be scattered."""
        with torch.set_grad_enabled(cell.keep_graph):
            partial = self._run(self._module.word_embeddings, cell.inputs["tokens"])
        if partial.requires_grad:
            cell.words = get_gradient_edge(partial)
        return partial.detach()

    def join(self, cell: Cell, reduced: Tensor) -> Tensor:
        """JOIN: positions and dropout, to the first block's x [s, b, h]."""
        reduced.requires_grad_(cell.keep_graph)
        with torch.set_grad_enabled(cell.keep_graph):
            x = self._run(self._module, cell.inputs["tokens"], cell.inputs["positions"], answer=reduced)
        if cell.keep_graph:
            cell.join_graph = (reduced, get_gradient_edge(x))
        return x.detach()

    def wgrad_of_all(self, tape: Tape, cells: list[Cell]) -> None:
        """WGRAD: the gradients of all sub-batches at once, since each is as large as the vocabulary."""
        torch.autograd.backward([cell.join_graph[1] for cell in cells], tape.gradients)
        if cells[0].words is not None:  # None where the word embeddings are frozen
            gradients = [cell.join_graph[0].grad for cell in cells]
            if self.scatters:
                gathering = [self.collectives.all_gather(gradient.contiguous()) for gradient in gradients]
                gradients = [in_flight.wait() for in_flight in gathering]
            torch.autograd.backward([cell.words for cell in cells], gradients)
        for cell in cells:
            cell.words = cell.join_graph = None

    def _run(self, function: Callable[..., Tensor], *arguments: Tensor, answer: Tensor | None = None) -> Tensor:
        self._scheduling.active, self._scheduling.answer = True, answer
        try:
            return function(*arguments)
        finally:
            self._scheduling.active, self._scheduling.answer = False, None


class Exit:
    """The end of a pipeline stage whose last block has sub-groups. All that it does is to bring x together."""

    part = Part(Role.EXIT)
    chunked_attention = None
    communicates_inside = False


class Head(CutPart):
    """Final norm, output layer, and one cross-entropy over the logits of all sub-batches.

    Args:
        loss: (labels [b, s], logits [s, b, vocabulary/t]) → [b, s], Megatron's own function. Its small collectives are
            started once, when no large one is in their way.
    """

    part = Part(Role.HEAD)
    # Its weight gradient keeps the gradient of the logits alive, and has its place before that of tied embeddings.
    wgrad_may_move = False

    def __init__(self, *, loss: Callable[[Tensor, Tensor], Tensor], **cut_arguments):
        super().__init__(**cut_arguments)
        self._loss = loss

    def loss(self, tape: Tape) -> None:
        """LOSS: tape.loss, from tape.logits."""
        logits, tape.logits = tape.joined(tape.logits).requires_grad_(tape.keep), []
        with torch.set_grad_enabled(tape.keep):
            loss = self._loss(tape.labels, logits)
        if tape.keep:
            tape.loss_graph = (logits, get_gradient_edge(loss))
        tape.loss = loss.detach()

    def loss_grad(self, tape: Tape) -> None:
        """LOSS_GRAD: the gradient of each sub-batch's logits, from that of the loss."""
        (logits, end), tape.loss_graph = tape.loss_graph, None
        torch.autograd.backward((end,), (tape.loss_gradient,))
        tape.gradients = tape.cut(logits.grad)
