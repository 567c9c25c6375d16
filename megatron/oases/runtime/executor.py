"""Runs a list of operations on tensors.

The order of collectives is the list's, the same on every rank. Only filler is dynamic: where the host can see that
a collective is still in flight, it runs operations that no gradient waits for, instead of waiting.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Cell, Tape
from megatron.oases.runtime.collectives import Collectives, InFlight
from megatron.oases.runtime.ends import Embedding, Head
from megatron.oases.schedule import Kind, Operation


@dataclass(frozen=True, kw_only=True)
class Filler:
    """What may leave its place in the order, to fill the wait for a collective.

    Args:
        max_postponed_wgrads: WGRADs that may wait for a gap; their inputs stay alive meanwhile. 0: run them in place.
        max_recomputes_ahead: RECOMPUTEs that may run before their turn; their graphs stay alive meanwhile.
    """

    max_postponed_wgrads: int = 0
    max_recomputes_ahead: int = 0


class Executor:
    """Runs lists over a chain of parts.

    Args:
        parts: the chain.
        collectives: those of the tensor-parallel group.
        filler: what may fill waits.
    """

    def __init__(self, parts: Sequence[Embedding | Block | Head], collectives: Collectives, filler: Filler):
        self._parts = parts
        self._collectives = collectives
        self._filler = filler

    def run(self, order: Sequence[Operation], *tapes: Tape) -> None:
        """Runs the list. `tapes` are the micro-batches that it deals with; what they hold is used up or filled in."""
        _Run(self._parts, self._collectives, self._filler, order, tapes).run()


class _Run:
    """One run of a list, with the state of its filler."""

    def __init__(
        self,
        parts: Sequence[Embedding | Block | Head],
        collectives: Collectives,
        filler: Filler,
        order: Sequence[Operation],
        tapes: Sequence[Tape],
    ):
        self._parts = parts
        self._collectives = collectives
        self._filler = filler
        self._order = order
        self._tapes = tapes
        self._postponed: deque[Operation] = deque()
        self._recomputes = deque(
            op for op in order if op.kind is Kind.RECOMPUTE and not parts[op.place].communicates_inside
        )
        self._ahead: set[Operation] = set()

    def run(self) -> None:
        for operation in self._order:
            if operation.kind is Kind.WGRAD and self._filler.max_postponed_wgrads:
                self._postponed.append(operation)
                if len(self._postponed) > self._filler.max_postponed_wgrads:
                    self._run(self._postponed.popleft())
            elif operation in self._ahead:
                self._ahead.remove(operation)
            else:
                if operation.kind is Kind.RECOMPUTE and self._recomputes and self._recomputes[0] == operation:
                    self._recomputes.popleft()
                if operation.kind.waits:
                    self._fill(self._cell(operation).in_flight)
                self._run(operation)
        while self._postponed:
            self._run(self._postponed.popleft())

    def _fill(self, awaited: InFlight) -> None:
        """Runs filler until the collective has ended or there is no filler left."""
        while not awaited.is_completed():
            if self._postponed:
                self._run(self._postponed.popleft())
            elif self._recomputes and len(self._ahead) < self._filler.max_recomputes_ahead:
                operation = self._recomputes.popleft()
                self._ahead.add(operation)
                self._run(operation)
            else:
                return

    def _cell(self, operation: Operation) -> Cell:
        return self._tapes[operation.micro_batch].cells[operation.place, operation.sub_batch]

    def _run(self, operation: Operation) -> None:
        part, cell, i = self._parts[operation.place], self._cell(operation), operation.sub_batch
        tape = self._tapes[operation.micro_batch]
        match operation.kind:
            case Kind.FORWARD:
                cell.x, tape.xs[i] = tape.xs[i], None
                part.forward(cell)
            case Kind.REDUCE | Kind.REDUCE_GRAD:
                partial, cell.partial = cell.partial, None
                cell.in_flight = self._collectives.all_reduce(partial.contiguous())
            case Kind.JOIN:
                in_flight, cell.in_flight = cell.in_flight, None
                tape.xs[i] = part.join(cell, in_flight.wait())
                if not tape.keep:
                    cell.x = None
            case Kind.LOSS:
                part.loss(tape, self._cells(operation))
            case Kind.LOSS_GRAD:
                part.loss_grad(tape)
            case Kind.RECOMPUTE:
                part.recompute(cell)
            case Kind.DGRAD:
                gradient, tape.gradients[i] = tape.gradients[i], None
                part.dgrad(cell, gradient)
            case Kind.WGRAD if isinstance(part, Embedding):
                part.wgrad_of_all(tape, self._cells(operation))
            case Kind.WGRAD:
                part.wgrad(cell)
            case Kind.NORM_GRAD:
                in_flight, cell.in_flight = cell.in_flight, None
                tape.gradients[i] = part.norm_grad(cell, in_flight.wait())

    def _cells(self, operation: Operation) -> list[Cell]:
        tape = self._tapes[operation.micro_batch]
        return [tape.cells[operation.place, i] for i in range(len(tape.batch_sizes))]

