"""A GEMM in pieces along the sequence: while one piece is computed, that before it is on its way.

Decomposed so, a collective overlaps with the very GEMM that feeds it (Wang et al., ASPLOS 2023), where whole tensors could only
overlap with what does not depend on them.
"""

import torch
from torch import Tensor

from megatron.oases.runtime.collectives import InFlight


class PiecedGemm:
    """left [s, b, in] @ right [in, out] → [s, b, out], and the collectives that each piece of it goes through.

    Args:
        left: what is cut along s.
        right: the weight, or its transpose.
        pieces: number of pieces, as even as they can be.
    """

    def __init__(self, left: Tensor, right: Tensor, pieces: int):
        self._left = list(left.detach().tensor_split(pieces))
        self._right = right.detach()
        self._whole = left.new_empty((*left.shape[:-1], right.shape[1]))
        self._pieces = self._whole.tensor_split(pieces)
        self._in_flight: list[InFlight] = []
        self._next = 0

    def run(self) -> Tensor:
        """Computes the next piece [s_i, b, out], which lies in its place in the whole."""
        piece = self._pieces[self._next]
        torch.mm(self._left[self._next].flatten(0, -2), self._right, out=piece.view(-1, piece.shape[-1]))
        self._left[self._next] = None  # what only this piece needed
        self._next += 1
        return piece

    def started(self, in_flight: InFlight) -> "PiecedGemm":
        """To be told of each piece's collective, which works in place."""
        self._in_flight.append(in_flight)
        return self

    def is_completed(self) -> bool:
        return all(in_flight.is_completed() for in_flight in self._in_flight)

    def wait(self) -> Tensor:
        """Returns the whole once all of its pieces have arrived, and forgets it."""
        for in_flight in self._in_flight:
            in_flight.wait()
        whole, self._whole, self._pieces, self._in_flight = self._whole, None, (), []
        return whole
