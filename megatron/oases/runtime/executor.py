"""Runs a list of operations on tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Cell, Tape
from megatron.oases.runtime.collectives import InFlight
from megatron.oases.runtime.ends import Embedding, Exit, Head
from megatron.oases.runtime.redistribution import Redistribution
from megatron.oases.schedule import AWAITS, Filler, Kind, Operation, walk

_FED_IN_PIECES = {Kind.ROW: Kind.REDUCE, Kind.REROW: Kind.REREDUCE, Kind.COLUMN_GRAD: Kind.REDUCE_GRAD}

Observer = Callable[[Operation], AbstractContextManager]
_UNOBSERVED = nullcontext()


def unobserved(_: Operation) -> AbstractContextManager:
    """The observer that sees nothing."""
    return _UNOBSERVED


class Executor:
    """Runs lists over a chain of parts.

    Args:
        parts: the chain.
        into: for the places whose number of sub-groups differs from that before them, what brings x there.
        out_of: likewise, what brings its gradient back.
        filler: what may fill waits.
        sequence_parallel: whether what lies between blocks is split along the sequence.
        repeats_collectives: whether recomputation, and with sequence parallelism WGRAD, repeat collectives.
        observer: what it returns for an operation is entered before that runs, and left behind it.
    """

    def __init__(
        self,
        parts: Sequence[Embedding | Block | Head | Exit],
        *,
        into: Mapping[int, Redistribution],
        out_of: Mapping[int, Redistribution],
        filler: Filler,
        sequence_parallel: bool,
        repeats_collectives: bool,
        observer: Observer = unobserved,
    ):
        self._parts = parts
        self._into = into
        self._out_of = out_of
        self._filler = filler
        self._sequence_parallel = sequence_parallel
        self._repeats_collectives = repeats_collectives
        self._observer = observer

    def run(self, order: Sequence[Operation], *tapes: Tape) -> None:
        """Runs the list. `tapes` are the micro-batches that it deals with; what they hold is used up or filled in."""

        def has_ended(collective: Operation) -> bool:
            cell = tapes[collective.micro_batch].cells[collective.place, collective.sub_batch]
            return cell.in_flight[collective.kind].is_completed()

        for operation in walk(order, self._filler, may_move=self._may_move, has_ended=has_ended):
            with self._observer(operation):
                self._run(operation, tapes[operation.micro_batch])

    def _may_move(self, operation: Operation) -> bool:
        part = self._parts[operation.place]
        return part.wgrad_may_move if operation.kind.is_weight_gradient else not part.communicates_inside

    def _run(self, operation: Operation, tape: Tape) -> None:
        # Where there is one sub-batch only, its pieces may be counted instead.
        part, i = self._parts[operation.place], operation.sub_batch if len(tape.sizes) > 1 else 0
        cell = tape.cells[operation.place, i]
        match operation.kind:
            case Kind.FORWARD if isinstance(part, Embedding):
                cell.outgoing[Kind.REDUCE] = part.lookup(cell)
            case Kind.RESHARD:
                x, tape.xs[i] = tape.xs[i], None
                cell.in_flight[Kind.RESHARD] = self._into[operation.place].start(x)
            case Kind.ENTER:
                tape.xs[i] = self._redistributed(self._into, operation, cell, tape.xs[i])
            case Kind.NORM:
                normed = self._norm(part, cell, tape, i)
                cell.outgoing[Kind.GATHER] = normed
                if self._repeats_collectives and cell.keep_graph:
                    cell.outgoing[Kind.GATHER_INPUT] = normed
            case Kind.FORWARD:
                core_input = _waited_for(cell, Kind.GATHER)
                output = part.core(cell, self._norm(part, cell, tape, i) if core_input is None else core_input)
                if isinstance(part, Head):
                    tape.logits[i], cell.x = output, None
                elif cell.gemm is None:
                    cell.outgoing[Kind.REDUCE] = output
            case Kind.ROW | Kind.REROW | Kind.COLUMN_GRAD:
                cell.outgoing[_FED_IN_PIECES[operation.kind]] = cell.gemm.run()
            case Kind.JOIN:
                tape.xs[i] = part.join(cell, _waited_for(cell, Kind.REDUCE))
                if not cell.keep_x:
                    cell.x = None
            case Kind.LOSS:
                part.loss(tape)
            case Kind.LOSS_GRAD:
                part.loss_grad(tape)
            case Kind.RERESHARD:
                x, cell.x = cell.x, None
                cell.in_flight[Kind.RERESHARD] = self._into[operation.place].start(x)
            case Kind.REENTER:
                cell.x = self._redistributed(self._into, operation, cell, cell.x)
            case Kind.RENORM:
                normed = part.renorm(cell)
                cell.outgoing[Kind.REGATHER] = normed
                if self._repeats_collectives:
                    cell.outgoing[Kind.GATHER_INPUT] = normed
            case Kind.RECOMPUTE:
                core_input = _waited_for(cell, Kind.REGATHER)
                partial = part.recompute(cell, part.renorm(cell) if core_input is None else core_input)
                if self._repeats_collectives and cell.gemm is None:
                    cell.outgoing[Kind.REREDUCE] = partial
            case Kind.REJOIN:
                x = part.rejoin(cell, _waited_for(cell, Kind.REREDUCE))
                after = tape.cells.get((operation.place + 1, i))
                if after is not None and not after.keep_x:
                    after.x = x
            case Kind.JOIN_GRAD:
                cell.outgoing[Kind.GATHER_GRAD] = self._join_grad(part, cell, tape, i)
            case Kind.DGRAD:
                gradient = _waited_for(cell, Kind.GATHER_GRAD)
                if gradient is None:
                    gradient = self._join_grad(part, cell, tape, i)
                core_input_gradient = part.dgrad(cell, gradient)
                if cell.gemm is None:
                    cell.outgoing[Kind.REDUCE_GRAD] = core_input_gradient
            case Kind.WGRAD if isinstance(part, Embedding):
                part.wgrad_of_all(tape, [tape.cells[operation.place, i] for i in range(len(tape.sizes))])
            case Kind.WGRAD:
                part.wgrad(cell, _waited_for(cell, Kind.GATHER_INPUT), is_last=tape.is_last(operation))
            case Kind.ROW_WGRAD:
                part.row_wgrad(cell, is_last=tape.is_last(operation))
            case Kind.NORM_GRAD:
                tape.gradients[i] = part.norm_grad(cell, _waited_for(cell, Kind.REDUCE_GRAD))
            case Kind.RESHARD_GRAD:
                gradient, tape.gradients[i] = tape.gradients[i], None
                cell.in_flight[Kind.RESHARD_GRAD] = self._out_of[operation.place].start(gradient)
            case Kind.LEAVE:
                tape.gradients[i] = self._redistributed(self._out_of, operation, cell, tape.gradients[i])
            case communication:
                assert communication.is_communication
                tensor = cell.outgoing.pop(communication).contiguous()
                in_flight = self._started(communication, part)(tensor)
                cell.in_flight[communication] = in_flight if cell.gemm is None else cell.gemm.started(in_flight)

    def _started(self, communication: Kind, part: Embedding | Block | Head) -> Callable[[Tensor], InFlight]:
        if communication in (Kind.GATHER, Kind.REGATHER, Kind.GATHER_GRAD, Kind.GATHER_INPUT):
            return part.collectives.all_gather
        scatters = part.scatters if isinstance(part, Embedding) else self._sequence_parallel
        return part.collectives.reduce_scatter if scatters else part.collectives.all_reduce

    @staticmethod
    def _redistributed(
        redistributions: Mapping[int, Redistribution], operation: Operation, cell: Cell, here: Tensor | None
    ) -> Tensor:
        """What was sent, or, where nothing need be sent, this sub-group's share of what is here."""
        received = _waited_for(cell, AWAITS[operation.kind])
        return redistributions[operation.place].start(here).wait() if received is None else received

    @staticmethod
    def _norm(part: Block | Head, cell: Cell, tape: Tape, i: int) -> Tensor:
        cell.x, tape.xs[i] = tape.xs[i], None
        return part.norm(cell)

    @staticmethod
    def _join_grad(part: Block | Head, cell: Cell, tape: Tape, i: int) -> Tensor:
        gradient, tape.gradients[i] = tape.gradients[i], None
        return part.join_grad(cell, gradient)


def _waited_for(cell: Cell, communication: Kind) -> Tensor | None:
    """What the collective brought; None where the schedule has no such collective."""
    in_flight = cell.in_flight.pop(communication, None)
    return in_flight.wait() if in_flight is not None else None
