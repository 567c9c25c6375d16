"""Sub-batches along the sequence: attention of one chunk over the keys and values of the chunks before it.

A micro-batch of one sample cannot be cut along the batch. But with causal attention a token sees only what comes before
it: the first chunk of the sequence can go through a block, and its collective be in flight, before the second chunk
begins. Everything else in a block works on tokens one by one. In backward the last chunk goes first, and hands the gradients
of the keys and values that it used to the chunks that they belong to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(slots=True)
class Chunk:
    """One chunk in one attention block. Tensors are [s_i, b, groups/t, d].

    Args:
        earlier: the chunks before it, in order.
    """

    earlier: list["Chunk"]
    key_value: tuple[Tensor, Tensor] | None = None  # until the chunks behind it have used them
    edges: tuple[GradientEdge, GradientEdge] | None = None
    leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the earlier chunks', in this chunk's graph
    gradients: tuple[Tensor, Tensor] | None = None  # of its key and value, from the chunks behind it

    def collect(self) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """Where the gradients that the chunks behind it have handed over enter this chunk's graph."""
        if self.gradients is None:
            return (), ()
        edges, gradients = self.edges, self.gradients
        self.edges = self.gradients = None
        return edges, gradients

    def hand_over(self) -> None:
        """After this chunk's backward: gives the earlier chunks the gradients of what it used of theirs."""
        for chunk, leaves in zip(self.earlier, self.leaves, strict=True):
            gradients = tuple(leaf.grad for leaf in leaves)
            if chunk.gradients is not None:
                gradients = tuple(mine.add_(other) for mine, other in zip(chunk.gradients, gradients, strict=True))
            chunk.gradients = gradients
        self.leaves, self.key_value = [], None


class ChunkedAttention:
    """Makes a core attention see earlier chunks, while a chunk is announced to it.

    Args:
        core_attention: Megatron's module, or one with the same arguments.
    """

    def __init__(self, core_attention: torch.nn.Module):
        self._chunk: Chunk | None = None
        core_attention.register_forward_pre_hook(self._extend)

    @contextmanager
    def on(self, chunk: Chunk | None) -> Iterator[None]:
        self._chunk = chunk
        try:
            yield
        finally:
            self._chunk = None

    def _extend(self, module: torch.nn.Module, arguments: tuple) -> tuple | None:
        chunk = self._chunk
        if chunk is None:
            return None
        query, key, value, *others = arguments
        chunk.key_value = (key.detach(), value.detach())
        earlier = [each.key_value for each in chunk.earlier]
        if torch.is_grad_enabled():
            chunk.edges = (get_gradient_edge(key), get_gradient_edge(value))
            # detach makes a tensor of its own of each, so that every chunk collects its own gradients
            earlier = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in earlier]
            chunk.leaves = earlier
        keys = torch.cat([*(k for k, _ in earlier), key])
        values = torch.cat([*(v for _, v in earlier), value])
        return query, keys, values, *others


def chunk_of_mask(mask: Tensor | None, start: int, end: int, device: torch.device) -> Tensor | None:
    """The part of an attention mask for the queries from `start` to `end`, over the keys before `end`.

    Args:
        mask: [b or 1, 1, s, s], True where it hides, and causal; None for the causal mask.

    Returns:
        [b or 1, 1, end - start, end], or None for the causal mask of a first chunk.
    """
    if mask is not None:
        return mask[:, :, start:end, :end]
    if start == 0:
        return None
    return torch.ones(1, 1, end - start, end, dtype=torch.bool, device=device).triu(start + 1)
