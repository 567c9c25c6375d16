"""Runs a schedule's lists on costs instead of tensors: same lists, same walk, a clock in the place of a device.

One list (a forward pass, a backward pass, or one of each together) is simulated at a time. All tensor-parallel
collectives of a list are waited for within it, so what comes before has no influence on how long it takes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.oases.cost.clock import Clock, Lane, Transfer
from megatron.oases.cost.memory import ActivationMemory
from megatron.oases.cost.model import Collective, Contention, CostModel, Group
from megatron.oases.cost.redistribution import Redistribution
from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import AWAITS, Filler, Kind, Layout, Operation, Part, Role, walk

# Megatron's cross-entropy over a vocabulary that is spread over ranks: maximum, the target's logit, sum.
_LOSS_ALL_REDUCES = 3
_FP32_BYTES = 4
_REDISTRIBUTING = (Kind.RESHARD, Kind.RERESHARD, Kind.RESHARD_GRAD)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start_ms` to `end_ms`, on one lane of one pipeline stage."""

    lane: str  # compute, communication, data, pipeline
    name: str
    start_ms: float
    end_ms: float
    stage: int = 0
    micro_batch: int = 0
    operation: Operation | None = None
    role: Role | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """One list, from its start at 0.

    Args:
        elapsed_ms: until the compute lane is through.
        compute_ms: of its computation, alone.
        communication_ms: of its tensor-parallel collectives, alone.
        in_flight_ms: while those that its operations start are in flight, but for the loss's small ones.
        waited_ms: while computation stands still for them.
        data_ms: of its data-parallel collectives, alone.
        data_left_ms: what is left of these when the compute lane is through.
        after_bytes: what it leaves allocated, less what it has freed.
        peak_bytes: the most that was allocated beyond what was there at its start.
        spans: where they were recorded, with micro-batches 0 and 1 as the list has them.
        memory: (time, bytes beyond those at the start), where it was recorded.
    """

    elapsed_ms: float
    compute_ms: float
    communication_ms: float
    in_flight_ms: float
    waited_ms: float
    data_ms: float
    data_left_ms: float
    after_bytes: int
    peak_bytes: int
    spans: tuple[Span, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()

    @property
    def exposed_ms(self) -> float:
        """What it takes longer than its computation alone: waits, and slow-down by what is in flight."""
        return self.elapsed_ms - self.compute_ms


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Data-parallel collectives that run beside a list.

    Args:
        arriving: (places, ms): gathers of parameters, in order; these parts' first operation waits for it.
        leaving: (places, ms): reductions of gradients, in order; each starts once all weight gradients of these parts
            have been computed.
    """

    arriving: tuple[tuple[frozenset[int], float], ...] = ()
    leaving: tuple[tuple[frozenset[int], float], ...] = ()


def collective_of(kind: Kind, role: Role, workload: Workload) -> Collective:
    """What a communicating operation that redistributes nothing asks of the part's sub-group."""
    if kind in (Kind.GATHER, Kind.REGATHER, Kind.GATHER_GRAD, Kind.GATHER_INPUT):
        return Collective.ALL_GATHER
    # Learned positions are added to whole sequences, so Megatron reduces the embedding's output before it scatters it.
    whole = role is Role.EMBEDDING and workload.model.learned_positions
    return Collective.REDUCE_SCATTER if workload.sequence_parallel and not whole else Collective.ALL_REDUCE


class StageSimulator:
    """Simulates the lists of one pipeline stage.

    Args:
        cost: times of single operations.
        workload: what is trained.
        layout: what the stage's schedule is made for.
        sizes: samples of each sub-batch.
        filler: what may fill waits.
        record: whether spans and memory over time are wanted.
    """

    def __init__(
        self,
        cost: CostModel,
        workload: Workload,
        layout: Layout,
        sizes: tuple[int, ...],
        filler: Filler,
        *,
        record: bool,
    ):
        self.cost = cost
        self.workload = workload
        self.chain = layout.chain
        self.filler = filler
        self.record = record
        self._layout = layout
        self._sizes = sizes
        self._memory = ActivationMemory(workload, layout, sizes)
        self._known: dict[tuple, tuple[float, int, int]] = {}
        # Places whose operations cost the same: those with the same parts around them.
        around: dict[tuple[Part, ...], int] = {}
        self._alike = [
            around.setdefault(self.chain[max(place - 1, 0) : place + 2], len(around))
            for place in range(len(self.chain))
        ]
        self._contention: dict[Group, Contention] = {}

    def run(self, order: Sequence[Operation], data: DataParallel = DataParallel()) -> PassResult:
        """Simulates one list."""
        return _Run(self, data).run(order)

    def cost_of(self, operation: Operation) -> tuple[float, int, int]:
        """(ms alone, bytes at most while it runs, bytes afterwards): looked up once for all layers that are alike."""
        # The ends of the chain hand over to other stages, so they are not like the parts between them.
        place, last = operation.place, len(self.chain) - 1
        end = place if place in (0, last) else None
        key = (operation.kind, self._alike[place], self._samples(operation), end)
        known = self._known.get(key)
        if known is None:
            ms = self._transfer_ms(operation) if operation.kind.is_communication else self._compute_ms(operation)
            effect = self._memory.effect(operation)
            known = self._known[key] = (ms, max(effect.during_bytes, effect.after_bytes), effect.after_bytes)
        return known

    def transfer_bytes(self, operation: Operation) -> int:
        """Of the whole tensor [s, b, h] of its sub-batch, on the sub-group that it belongs to."""
        samples = self._samples(operation)
        if operation.kind in _REDISTRIBUTING:
            return self._redistribution(operation).received_bytes(self.workload, samples)
        whole = self.workload.hidden_bytes(samples // self.chain[operation.place].sub_groups)
        return -(-whole // self._pieces(operation))

    def contention_of(self, operation: Operation) -> Contention:
        """What happens while its collective and computation run at the same time."""
        if operation.kind in _REDISTRIBUTING:
            group = self._redistribution(operation).group(self.workload)
        else:
            group = self._sub_group(operation.place)
        if group not in self._contention:
            self._contention[group] = self.cost.contention(group)
        return self._contention[group]

    def inside_ms(self, operation: Operation) -> tuple[float, ...]:
        """The collectives that an operation starts and waits for by itself: (ms alone) of each, in order."""
        role, group = self.chain[operation.place].role, self.workload.tensor_group
        if operation.kind is Kind.LOSS:
            size_bytes = self.workload.model.sequence * self.workload.micro_batch * _FP32_BYTES
            return (self.cost.collective_ms(Collective.ALL_REDUCE, group, size_bytes),) * _LOSS_ALL_REDUCES
        if role is Role.EMBEDDING and operation.kind is Kind.WGRAD and self.workload.sequence_parallel:
            return tuple(
                self.cost.collective_ms(Collective.ALL_GATHER, group, self.workload.hidden_bytes(samples))
                for samples in self._sizes
            )
        return ()

    def awaited(self, operation: Operation) -> tuple[Operation, ...]:
        """The collectives that an operation waits for, whether or not there is anybody to communicate with."""
        if self._layout.pieces > 1:
            return self._layout.awaited(operation)
        kind = AWAITS.get(operation.kind)
        if kind is None:
            return ()
        return (Operation(kind, operation.place, operation.sub_batch, operation.micro_batch),)

    def _samples(self, operation: Operation) -> int:
        """Of its sub-batch."""
        return self._sizes[self._layout.sub_batch_of(operation)]

    def _pieces(self, operation: Operation) -> int:
        """Into how many pieces its collective or its GEMM is cut."""
        if self._layout.pieces == 1:
            return 1
        return self._layout.times(operation.kind, operation.place)

    def _compute_ms(self, operation: Operation) -> float:
        part, kind = self.chain[operation.place], operation.kind
        if part.is_block:
            kind = self._layout.computes_as(kind)
        if kind in (Kind.ENTER, Kind.LEAVE):
            return 0.0
        joint = kind in (Kind.LOSS, Kind.LOSS_GRAD) or (kind is Kind.WGRAD and part.role is Role.EMBEDDING)
        samples = self.workload.micro_batch if joint else self._samples(operation)
        shared = {"degree": self.workload.degree_of(part), "samples": samples // part.sub_groups}
        if kind in (Kind.ROW, Kind.COLUMN_GRAD):
            return self.cost.compute_ms(kind, part, pieces=self._pieces(operation), **shared)
        ms = self.cost.compute_ms(kind, part, **shared)
        if kind is Kind.DGRAD and self._layout.pieces > 1:
            ms = max(0.0, ms - self.cost.compute_ms(Kind.COLUMN_GRAD, part, **shared))
        return ms

    def _transfer_ms(self, operation: Operation) -> float:
        if operation.kind in _REDISTRIBUTING:
            samples = self._samples(operation)
            return self._redistribution(operation).ms(self.cost, self.workload, samples)
        group = self._sub_group(operation.place)
        if group.size == 1:
            return 0.0
        collective = collective_of(operation.kind, self.chain[operation.place].role, self.workload)
        return self.cost.collective_ms(collective, group, self.transfer_bytes(operation))

    def _sub_group(self, place: int) -> Group:
        return Group(self.workload.degree_of(self.chain[place]))

    def _redistribution(self, operation: Operation) -> Redistribution:
        place = operation.place
        forth = Redistribution(self._layout.sub_groups_before(place), self.chain[place].sub_groups)
        return forth.reversed() if operation.kind is Kind.RESHARD_GRAD else forth


class _Run:
    """One list on its way through the clock."""

    def __init__(self, stage: StageSimulator, data: DataParallel):
        workload = stage.workload
        self._stage = stage
        self._lane = Lane() if workload.tensor > 1 else None
        has_data = bool(data.arriving or data.leaving)
        self._data_lane = Lane() if has_data else None
        self._data_contention = stage.cost.contention(workload.data_group) if has_data else None
        self._clock = Clock(lane for lane in (self._lane, self._data_lane) if lane is not None)
        self._transfers: dict[Operation, Transfer] = {}
        self._notes: list[tuple[Transfer, str, str, Operation | None]] = []  # transfer, lane, name, operation
        self._arriving = self._gathered(data)
        self._leaving = list(data.leaving)
        self._flights: list[Transfer] = []  # one after another
        self._compute_ms = self._waited_ms = 0.0
        self._allocated = self._peak = 0
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []

    def run(self, order: Sequence[Operation]) -> PassResult:
        outstanding = Counter(op.place for op in order if _ends_gradient(op)) if self._leaving else Counter()
        for operation in walk(order, self._stage.filler, may_move=self._may_move, has_ended=self._has_ended):
            if operation.kind.is_communication:
                self._communicate(operation)
            else:
                self._compute(operation)
            if self._leaving and _ends_gradient(operation):
                outstanding[operation.place] -= 1
                self._reduce_ready(outstanding)
        elapsed_ms = self._clock.now_ms
        data_ms = data_left_ms = 0.0
        if self._data_lane is not None:
            assert not self._leaving, "gradients that no list computes"
            self._clock.drain(self._data_lane)
            data_ms, data_left_ms = self._data_lane.busy_ms, self._clock.now_ms - elapsed_ms
        return PassResult(
            elapsed_ms=elapsed_ms,
            compute_ms=self._compute_ms,
            communication_ms=self._lane.busy_ms if self._lane is not None else 0.0,
            in_flight_ms=sum(transfer.end_ms - transfer.start_ms for transfer in self._flights),
            waited_ms=self._waited_ms,
            data_ms=data_ms,
            data_left_ms=data_left_ms,
            after_bytes=self._allocated,
            peak_bytes=self._peak,
            spans=tuple(self._spans) + tuple(self._noted_spans()),
            memory=tuple(self._memory),
        )

    def _may_move(self, operation: Operation) -> bool:
        return not operation.kind.is_weight_gradient or self._stage.chain[operation.place].is_block

    def _has_ended(self, collective: Operation) -> bool:
        return collective not in self._transfers or self._transfers[collective].end_ms is not None

    def _communicate(self, operation: Operation) -> None:
        ms, during_bytes, after_bytes = self._stage.cost_of(operation)
        self._account(during_bytes, after_bytes)
        if ms > 0:  # else there is nobody to communicate with, and nothing to wait for
            contention = self._stage.contention_of(operation)
            transfer = self._transfers[operation] = self._clock.start(self._lane, ms, contention)
            self._flights.append(transfer)
            if self._stage.record:
                self._notes.append((transfer, "communication", str(operation), operation))

    def _compute(self, operation: Operation) -> None:
        ms, during_bytes, after_bytes = self._stage.cost_of(operation)
        clock, kind = self._clock, operation.kind
        if kind in AWAITS and self._lane is not None:
            for started in self._stage.awaited(operation):
                transfer = self._transfers.get(started)
                if transfer is not None and transfer.end_ms is None:
                    self._wait(transfer)
        if kind in (Kind.FORWARD, Kind.NORM) and operation.place in self._arriving:
            clock.wait(self._arriving[operation.place])
        start_ms = clock.now_ms
        # The embedding's gradient is gathered before it is used; the loss has its collectives between its sums.
        if kind is Kind.WGRAD and self._lane is not None:
            self._communicate_inside(operation)
            start_ms = clock.now_ms
        clock.compute(ms)
        self._compute_ms += ms
        if self._stage.record:
            part = self._stage.chain[operation.place]
            span = Span("compute", str(operation), start_ms, clock.now_ms, operation=operation, role=part.role)
            self._spans.append(span)
        if kind is Kind.LOSS and self._lane is not None:
            self._communicate_inside(operation)
        self._account(during_bytes, after_bytes)

    def _communicate_inside(self, operation: Operation) -> None:
        for ms in self._stage.inside_ms(operation):
            transfer = self._clock.start(self._lane, ms, self._stage.contention_of(operation))
            self._notes.append((transfer, "communication", f"{operation} inside", operation))
            if operation.kind is Kind.LOSS:
                self._clock.wait(transfer)
            else:
                self._flights.append(transfer)
                self._wait(transfer)

    def _wait(self, transfer: Transfer) -> None:
        since_ms = self._clock.now_ms
        self._clock.wait(transfer)
        self._waited_ms += self._clock.now_ms - since_ms

    def _account(self, during_bytes: int, after_bytes: int) -> None:
        peak = self._allocated + during_bytes
        if peak > self._peak:
            self._peak = peak
        self._allocated += after_bytes
        if self._stage.record:
            self._memory.append((self._clock.now_ms, peak))
            self._memory.append((self._clock.now_ms, self._allocated))

    def _gathered(self, data: DataParallel) -> dict[int, Transfer]:
        arriving = {}
        for places, ms in data.arriving:
            transfer = self._clock.start(self._data_lane, ms, self._data_contention)
            self._notes.append((transfer, "data", "gather parameters", None))
            arriving |= dict.fromkeys(places, transfer)
        return arriving

    def _reduce_ready(self, outstanding: Counter) -> None:
        while self._leaving and not any(outstanding[place] for place in self._leaving[0][0]):
            transfer = self._clock.start(self._data_lane, self._leaving.pop(0)[1], self._data_contention)
            self._notes.append((transfer, "data", "reduce gradients", None))

    def _noted_spans(self) -> list[Span]:
        if not self._stage.record:
            return []
        spans = []
        for transfer, lane, name, operation in self._notes:
            role = self._stage.chain[operation.place].role if operation is not None else None
            size_bytes = None
            if operation is not None and operation.kind.is_communication:
                size_bytes = self._stage.transfer_bytes(operation)
            spans.append(
                Span(
                    lane,
                    name,
                    transfer.start_ms,
                    transfer.end_ms,
                    operation=operation,
                    role=role,
                    size_bytes=size_bytes,
                )
            )
        return spans


def _ends_gradient(operation: Operation) -> bool:
    """Whether a gradient of a parameter may be complete with it."""
    return operation.kind.is_weight_gradient or operation.kind is Kind.NORM_GRAD
