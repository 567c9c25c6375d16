"""What an order is made for, which operations it consists of, and what each of them depends on."""

import dataclasses
import hashlib
from dataclasses import dataclass

from megatron.oases.schedule.operation import AWAITS, Kind, Operation, Part, Role

_IN_PIECES = frozenset({Kind.ROW, Kind.REDUCE, Kind.REROW, Kind.REREDUCE, Kind.COLUMN_GRAD, Kind.REDUCE_GRAD})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What an order is made for.

    Args:
        chain: the parts of the pipeline stage, in the order of the forward pass.
        sub_batches: number of sub-batches a micro-batch is cut into. With 1 nothing is there to hide a collective behind
            but weight gradients.
        along_sequence: whether the cuts are along the sequence instead of the batch. Then a chunk needs the keys and
            values of the chunks before it, and in backward the gradients from the chunks behind it.
        sequence_parallel: whether what lies between blocks is split over the ranks along the sequence.
        recomputes_row_parallel: whether recomputation runs row-parallel GEMMs too, though no gradient needs their output.
        repeats_collectives: whether recomputation runs a whole layer again from its input, collectives included, and
            with sequence parallelism gathers what the weight gradient needs once more: as Megatron does. Then only the
            inputs of layers are kept, else those of all blocks.
        pieces: into how many pieces a GEMM whose output is communicated is decomposed, so that each is on its way while
            the next is computed.
    """

    chain: tuple[Part, ...]
    sub_batches: int
    along_sequence: bool = False
    sequence_parallel: bool = False
    recomputes_row_parallel: bool = False
    repeats_collectives: bool = False
    pieces: int = 1

    def __post_init__(self) -> None:
        if not any(part.is_block for part in self.chain):
            raise ValueError("a schedule needs at least one block")
        if self.sub_batches < 1:
            raise ValueError(f"sub_batches is {self.sub_batches}, must be at least 1")
        for place, part in enumerate(self.chain):
            is_inside = part.role is Role.EMBEDDING and place != 0
            is_inside |= part.role in (Role.HEAD, Role.EXIT) and place != len(self.chain) - 1
            if is_inside:
                raise ValueError(f"the {part.role.value} stands at place {place} of {len(self.chain)}")
        if self.along_sequence and self.sequence_parallel:
            raise ValueError("the sequence is split over the ranks already: no sub-batches along it")
        if self.pieces < 1:
            raise ValueError(f"pieces is {self.pieces}, must be at least 1")
        if self.pieces > 1 and (self.sub_batches > 1 or self.sequence_parallel):
            raise ValueError("pieces are those of a whole micro-batch, whose collectives are all-reduces")
        if self.repeats_collectives and not self.recomputes_row_parallel:
            raise ValueError("a repeated collective needs the output of the row-parallel GEMM")

    @property
    def has_embedding(self) -> bool:
        return self.chain[0].role is Role.EMBEDDING

    @property
    def has_head(self) -> bool:
        return self.chain[-1].role is Role.HEAD

    def computes_as(self, kind: Kind) -> Kind:
        """The kind whose computation an operation of a block repeats: FORWARD, JOIN, ENTER in what Megatron recomputes; else its
        own. In pieces neither FORWARD nor RECOMPUTE has the row-parallel GEMM."""
        if self.pieces > 1 and kind in (Kind.FORWARD, Kind.RECOMPUTE):
            return Kind.RECOMPUTE
        if kind is Kind.RECOMPUTE and self.recomputes_row_parallel:
            return Kind.FORWARD
        return {Kind.REJOIN: Kind.JOIN, Kind.REENTER: Kind.ENTER, Kind.REROW: Kind.ROW}.get(kind, kind)

    def sub_groups_before(self, place: int) -> int:
        """How many sub-groups share what enters a part. Stages hand whole micro-batches on."""
        return self.chain[place - 1].sub_groups if place > 0 else 1

    def is_recomputed_from_inside(self, place: int) -> bool:
        """Whether a recomputed block's input is not kept but recomputed: of an MLP whose whole layer is recomputed."""
        is_second = self.repeats_collectives and self.chain[place].role is Role.MLP
        return is_second and self.chain[place].recomputed and self.chain[place - 1].recomputed

    def forward_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations of a part in the forward pass, in order, for each sub-batch."""
        enter = self._resharding(place, Kind.RESHARD, Kind.ENTER)
        if self.chain[place].role is Role.EXIT:
            return enter
        gather = (Kind.NORM, Kind.GATHER) if self._gathers(place) else ()
        ends = () if self.chain[place].role is Role.HEAD else (Kind.REDUCE, Kind.JOIN)
        if self.pieces > 1 and self.chain[place].is_block:
            ends = (Kind.ROW, *ends)
        return enter + gather + (Kind.FORWARD,) + ends

    def recompute_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations that recompute a part, in order, for each sub-batch."""
        if not self.chain[place].recomputed:
            return ()
        enter = self._resharding(place, Kind.RERESHARD, Kind.REENTER) if self.is_recomputed_from_inside(place) else ()
        gather = (Kind.RENORM, Kind.REGATHER) if self._gathers(place) else ()
        repeated = (Kind.REREDUCE, Kind.REJOIN) if self.repeats_collectives else ()
        if self.pieces > 1 and repeated:
            repeated = (Kind.REROW, *repeated)
        return enter + gather + (Kind.RECOMPUTE,) + repeated

    def backward_kinds(self, place: int) -> tuple[Kind, ...]:
        """The operations of a part in the backward pass, in order, for each sub-batch."""
        role = self.chain[place].role
        if role is Role.EMBEDDING:
            return ()
        leave = self._resharding(place, Kind.RESHARD_GRAD, Kind.LEAVE)
        if role is Role.EXIT:
            return leave
        gather = (Kind.JOIN_GRAD, Kind.GATHER_GRAD) if self._gathers(place) and role is not Role.HEAD else ()
        if self._gathers(place) and self.repeats_collectives:
            gather += (Kind.GATHER_INPUT,)
        row = () if role is Role.HEAD else (Kind.ROW_WGRAD,)
        column = (Kind.COLUMN_GRAD,) if self.pieces > 1 else ()
        return gather + (Kind.DGRAD, *column, Kind.REDUCE_GRAD, Kind.WGRAD, *row, Kind.NORM_GRAD) + leave

    def times(self, kind: Kind, place: int) -> int:
        """How often a part has an operation: once for each sub-batch, or for each piece of the only one."""
        in_pieces = self.pieces > 1 and kind in _IN_PIECES and self.chain[place].role is not Role.EMBEDDING
        return self.pieces if in_pieces else self.sub_batches

    def sub_batch_of(self, operation: Operation) -> int:
        """The sub-batch that it works on. Where there is one only, its pieces may be counted instead."""
        return operation.sub_batch if self.sub_batches > 1 else 0

    def awaited(self, operation: Operation) -> tuple[Operation, ...]:
        """The collectives that an operation waits for."""
        kind, place = AWAITS.get(operation.kind), operation.place
        own = self.forward_kinds(place) + self.recompute_kinds(place) + self.backward_kinds(place)
        if kind not in own:
            return ()
        if self.times(kind, place) == self.sub_batches:
            return (dataclasses.replace(operation, kind=kind),)
        return tuple(dataclasses.replace(operation, kind=kind, sub_batch=i) for i in range(self.pieces))

    def _gathers(self, place: int) -> bool:
        return self.sequence_parallel and self.chain[place].role is not Role.EMBEDDING

    def _resharding(self, place: int, starts: Kind, waits: Kind) -> tuple[Kind, ...]:
        """What brings x into a part, or its gradient out of it, if its number of sub-groups is not that before it."""
        source, target = self.sub_groups_before(place), self.chain[place].sub_groups
        if source == target:
            return ()
        if starts is Kind.RESHARD_GRAD:
            source, target = target, source
        is_slice = target % source == 0 and not self.sequence_parallel
        return (waits,) if is_slice else (starts, waits)

    def forward_operations(self) -> set[Operation]:
        """All that the forward pass of one micro-batch consists of."""
        joint = {Operation(Kind.LOSS, len(self.chain) - 1)} if self.has_head else set()
        return joint | self._each(self.forward_kinds)

    def backward_operations(self) -> set[Operation]:
        """All that the backward pass of one micro-batch consists of."""
        joint = {Operation(Kind.LOSS_GRAD, len(self.chain) - 1)} if self.has_head else set()
        joint |= {Operation(Kind.WGRAD, 0)} if self.has_embedding else set()
        return joint | self._each(self.recompute_kinds) | self._each(self.backward_kinds)

    def _each(self, kinds) -> set[Operation]:
        return {
            Operation(kind, place, i)
            for place in range(len(self.chain))
            for kind in kinds(place)
            for i in range(self.times(kind, place))
        }

    def dependencies(self, operation: Operation) -> tuple[Operation, ...]:
        """The operations that must come before `operation` on the same rank, within its own pass.

        Only direct ones: what follows from them by transitivity is left out. A pass begins with what it is given: the
        tokens or the previous stage's output, the gradient of the loss or of the stage's output.
        """
        return self._own_dependencies(operation) + self._dependencies_on_chunks(operation)

    def _dependencies_on_chunks(self, operation: Operation) -> tuple[Operation, ...]:
        if not self.along_sequence or not self.chain[operation.place].is_block:
            return ()
        step = {Kind.FORWARD: -1, Kind.RECOMPUTE: -1, Kind.DGRAD: 1}.get(operation.kind)
        if step is None or operation.sub_batch + step not in range(self.sub_batches):
            return ()
        return (dataclasses.replace(operation, sub_batch=operation.sub_batch + step),)

    def _own_dependencies(self, operation: Operation) -> tuple[Operation, ...]:
        place, part = operation.place, self.chain[operation.place]

        def at(kind: Kind, place: int = place, sub_batch: int = operation.sub_batch) -> Operation:
            return Operation(kind, place, sub_batch, operation.micro_batch)

        def of_all(kind: Kind, place: int) -> tuple[Operation, ...]:
            return tuple(at(kind, place, i) for i in range(self.times(kind, place)))

        def same(kind: Kind) -> tuple[Operation, ...]:
            """Of the same part: for the same sub-batch or piece, all pieces, or what comes before all of them."""
            times, own_times = self.times(kind, place), self.times(operation.kind, place)
            if times == own_times:
                return (at(kind),)
            return of_all(kind, place) if times > own_times else (at(kind, place, 0),)

        def upstream() -> tuple[Operation, ...]:
            if part.role is Role.HEAD:
                return (at(Kind.LOSS_GRAD, place, 0),)
            return (at(self.backward_kinds(place + 1)[-1], place + 1),) if place + 1 < len(self.chain) else ()

        for kinds in (self.forward_kinds(place), self.recompute_kinds(place)):
            if operation.kind in kinds[1:]:
                return same(kinds[kinds.index(operation.kind) - 1])
        match operation.kind:
            case kind if kind in self.forward_kinds(place)[:1]:
                return (at(self.forward_kinds(place - 1)[-1], place - 1),) if place > 0 else ()
            case Kind.LOSS:
                return of_all(Kind.FORWARD, place)
            case kind if kind in self.recompute_kinds(place)[:1]:
                return (at(Kind.REJOIN, place - 1),) if self.is_recomputed_from_inside(place) else ()
            case Kind.LOSS_GRAD:
                return ()
            case Kind.JOIN_GRAD:
                return upstream()
            case Kind.GATHER_GRAD:
                return (at(Kind.JOIN_GRAD),)
            case Kind.DGRAD:
                gathers = Kind.GATHER_GRAD in self.backward_kinds(place)
                recomputed = (at(Kind.RECOMPUTE),) if part.recomputed else ()
                return recomputed + ((at(Kind.GATHER_GRAD),) if gathers else upstream())
            case Kind.GATHER_INPUT:
                return upstream()
            case Kind.WGRAD if part.role is Role.EMBEDDING:
                return of_all(self.backward_kinds(place + 1)[-1], place + 1)
            case Kind.WGRAD if self.repeats_collectives and self._gathers(place):
                return (at(Kind.DGRAD), at(Kind.GATHER_INPUT))
            case Kind.REDUCE_GRAD if self.pieces > 1:
                return same(Kind.COLUMN_GRAD)
            case Kind.COLUMN_GRAD | Kind.REDUCE_GRAD | Kind.WGRAD | Kind.ROW_WGRAD:
                return same(Kind.DGRAD)
            case Kind.NORM_GRAD:
                return same(Kind.REDUCE_GRAD)
            case Kind.RESHARD_GRAD:
                return upstream() if part.role is Role.EXIT else (at(Kind.NORM_GRAD),)
            case Kind.LEAVE:
                kinds = self.backward_kinds(place)
                return (at(kinds[-2]),) if len(kinds) > 1 else upstream()
        raise AssertionError(f"no dependencies known for {operation}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of operations.

    Args:
        name: the schedule's name, as `--oases-schedule` takes it.
        layout: what the order is made for.
        forward: the forward pass of one micro-batch.
        backward: the backward pass of one micro-batch.
        steady: the backward pass of micro-batch 0 together with the forward pass of micro-batch 1.
    """

    name: str
    layout: Layout
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    steady: tuple[Operation, ...]

    def digest(self) -> str:
        """Equal on two ranks only if they run the same operations in the same order."""
        lists = (" ".join(map(str, order)) for order in (self.forward, self.backward, self.steady))
        sub_groups = " ".join(str(part.sub_groups) for part in self.layout.chain)
        return hashlib.sha256(" | ".join([self.name, sub_groups, *lists]).encode()).hexdigest()
