"""The problem's tables from a cost model: what each part costs at each degree, recomputed or not.

Operations cost what they cost the simulator (`StageSimulator.cost_of`); here they are only added up by part.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.oases.cost.data_parallel import (
    copies_ms,
    gather_ms,
    norm_gradients_ms,
    overlaps_backward,
    reduce_ms,
    tied_embedding_ms,
)
from megatron.oases.cost.iteration import send_ms
from megatron.oases.cost.memory import ActivationMemory, static_memory_of, word_embedding_parameters
from megatron.oases.cost.model import CostModel
from megatron.oases.cost.redistribution import Redistribution
from megatron.oases.cost.simulator import StageSimulator
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.planner.problem import Choice, ChoiceCost, Pass, Problem, Segment, Table
from megatron.oases.schedule import Filler, Kind, Operation, Part, Role

_MOST_SEGMENTS = 8  # of layers: so many are solved in seconds, and twice as many gained 0.2 % on 96 layers
_RESHARDING = (Kind.RESHARD, Kind.ENTER, Kind.RESHARD_GRAD, Kind.LEAVE, Kind.RERESHARD, Kind.REENTER)


def problem_of(
    cost: CostModel,
    workload: Workload,
    system: System,
    *,
    degrees: Sequence[int],
    recomputation: Sequence[bool],
    memory_bytes: int | None,
) -> Problem:
    """The problem of choosing a plan for `workload`, whose TP degree is T.

    Args:
        cost: times of single operations.
        workload: what is trained; its own degrees and recomputation are not looked at.
        system: who orders the operations; vanilla Megatron is taken to hide nothing.
        degrees: that blocks may have.
        recomputation: whether they may be kept, recomputed, or both.
        memory_bytes: of a device.
    """
    tables = _Tables(cost, workload, system)
    choices = [Choice(degree, recomputed) for degree in degrees for recomputed in recomputation]
    layer = tuple({choice: tables.cost(role, choice) for choice in choices} for role in (Role.ATTENTION, Role.MLP))
    whole = Choice(workload.tensor)
    handed_on: Table = {whole: ChoiceCost(forward=Pass(), backward=Pass())}  # what enters or leaves a stage is whole
    layers = workload.model.layers // workload.pipeline
    sizes = segment_sizes(layers, most=_MOST_SEGMENTS // workload.pipeline)
    segments: list[Segment] = []
    for stage in range(workload.pipeline):
        is_first, is_last = stage == 0, stage == workload.pipeline - 1
        begin = {whole: tables.cost(Role.EMBEDDING, whole)} if is_first else handed_on
        end = {whole: tables.cost(Role.HEAD, whole)} if is_last else handed_on
        segments.append(Segment(parts=(begin,), stage=stage))
        segments += [Segment(parts=layer, repeats=repeats, stage=stage) for repeats in sizes]
        segments.append(Segment(parts=(end,), stage=stage))
    all_degrees = {*degrees, workload.tensor}
    return Problem(
        segments=tuple(segments),
        sub_batches=len(tables.sizes),
        overlaps=not system.is_vanilla,
        micro_batches=workload.micro_batches,
        redistribution_ms={
            (before, after): (tables.redistribution_ms(before, after), tables.redistribution_ms(after, before))
            for before in all_degrees
            for after in all_degrees
            if before != after
        },
        send_ms=send_ms(cost, workload),
        fixed_ms=cost.iteration_overhead_ms(workload.micro_batches)
        + cost.optimizer_ms(0)
        + norm_gradients_ms(cost, workload, system.layout(workload, 0)),
        memory_bytes=memory_bytes,
    )


def segment_sizes(layers: int, *, most: int = _MOST_SEGMENTS) -> list[int]:
    """How many layers are tied together in each of at most so many segments."""
    segments = min(layers, max(most, 1))
    base, larger = divmod(layers, segments)
    return [base + (i < larger) for i in range(segments)]


class _Tables:
    def __init__(self, cost: CostModel, workload: Workload, system: System):
        self._cost = cost
        self._workload = workload
        self._system = system
        self.sizes = system.sub_batch_sizes(workload)

    def cost(self, role: Role, choice: Choice) -> ChoiceCost:
        one = _OnePart(self._cost, self._workload, self._system, role, choice)
        workload = self._workload
        part = one.part
        parameters = workload.model.parameters(role, degree=choice.degree)
        if role is Role.HEAD and workload.model.tied_embeddings and workload.pipeline > 1:
            parameters += word_embedding_parameters(workload)
        updated = -(-parameters // workload.data) if workload.distributed_optimizer else parameters
        once_ms = copies_ms(self._cost, workload, [part])
        once_ms += self._cost.optimizer_ms(updated) - self._cost.optimizer_ms(0)
        once_ms += 0.0 if part.is_block else tied_embedding_ms(self._cost, workload)
        reducing_ms, gathering_ms = (each(self._cost, workload, parameters) for each in (reduce_ms, gather_ms))
        is_beside = overlaps_backward(workload)
        once_ms += (0.0 if is_beside else reducing_ms) + (0.0 if workload.overlap_param_gather else gathering_ms)
        return ChoiceCost(
            forward=one.forward(),
            backward=one.backward(),
            once_ms=once_ms,
            beside_last_ms=reducing_ms if is_beside else 0.0,
            static_bytes=static_memory_of(workload, parameters).total_bytes,
            kept_bytes=one.kept_bytes,
            working_bytes=one.working_bytes,
        )

    def redistribution_ms(self, before: int, after: int) -> float:
        """Of x from one degree to another, of a whole micro-batch."""
        step = Redistribution(self._workload.tensor // before, self._workload.tensor // after)
        return sum(step.ms(self._cost, self._workload, samples) for samples in self.sizes)


class _OnePart:
    """One part at one degree."""

    def __init__(self, cost: CostModel, workload: Workload, system: System, role: Role, choice: Choice):
        sub_groups = workload.tensor // choice.degree
        # A whole model of one layer, so that no block is the beginning or the end of a stage.
        blocks = [Part(each, choice.recomputed, sub_groups) for each in (Role.ATTENTION, Role.MLP)]
        chain = (Part(Role.EMBEDDING), *blocks, Part(Role.HEAD))
        self._place = [part.role for part in chain].index(role)
        self.part = chain[self._place]
        self._layout = replace(system.layout(replace(workload, pipeline=1), 0), chain=chain)
        self._sizes = system.sub_batch_sizes(workload)
        self._stage = StageSimulator(cost, workload, self._layout, self._sizes, Filler(), record=False)
        self._memory = ActivationMemory(workload, self._layout, self._sizes)
        self._forward = self._operations(self._layout.forward_kinds(self._place))
        self._recompute = self._operations(self._layout.recompute_kinds(self._place))
        self._backward = self._operations(self._layout.backward_kinds(self._place))
        if role is Role.HEAD:
            self._forward.append(Operation(Kind.LOSS, self._place))
            self._backward.insert(0, Operation(Kind.LOSS_GRAD, self._place))
        if role is Role.EMBEDDING:
            self._backward.append(Operation(Kind.WGRAD, self._place))

    def forward(self) -> Pass[float]:
        return Pass(compute_ms=self._ms(self._forward), transfer_ms=self._ms(self._forward, communicating=True))

    def backward(self) -> Pass[float]:
        may_wait = [op for op in self._backward if op.kind.is_weight_gradient and self.part.role is not Role.EMBEDDING]
        chain = [op for op in self._backward if op not in may_wait]
        return Pass(
            compute_ms=self._ms(chain),
            transfer_ms=self._ms([*self._recompute, *chain], communicating=True),
            ahead_ms=self._ms(self._recompute),
            movable_ms=self._ms(may_wait),
        )

    @property
    def kept_bytes(self) -> int:
        """Activations from forward to backward."""
        return max(sum(self._memory.effect(operation).after_bytes for operation in self._forward), 0)

    @property
    def working_bytes(self) -> int:
        """The most that is there beyond that, of all sub-batches, while they are recomputed and go backward."""
        allocated = peak = 0
        for operation in (*self._forward, *self._recompute, *self._backward):
            effect = self._memory.effect(operation)
            peak = max(peak, allocated + effect.during_bytes)
            allocated += effect.after_bytes
        return max(peak - self.kept_bytes, 0)

    def _operations(self, kinds: Sequence[Kind]) -> list[Operation]:
        """Without what stands between parts of different degree, which is no part's own. Sub-batches take turns."""
        own = [kind for kind in kinds if kind not in _RESHARDING]
        return [Operation(kind, self._place, i) for kind in own for i in range(len(self._sizes))]

    def _ms(self, operations: Sequence[Operation], *, communicating: bool = False) -> float:
        """Of all of them that communicate, or of all that compute. The loss does both."""
        if communicating:
            inside_ms = sum(sum(self._stage.inside_ms(operation)) for operation in operations)
            started = [operation for operation in operations if operation.kind.is_communication]
            return inside_ms + sum(self._stage.cost_of(operation)[0] for operation in started)
        computing = [operation for operation in operations if not operation.kind.is_communication]
        return sum(self._stage.cost_of(operation)[0] for operation in computing)
