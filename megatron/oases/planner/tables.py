"""The problem's tables from a cost model: what each part costs at each degree, recomputed or not.

Inside a TP group of T ranks a block of degree t runs as r = T/t sub-groups. Each holds the whole block sharded t ways,
and computes 1/r of every sub-batch. Its weight gradients are summed over the sub-groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.oases.cost.memory import ActivationMemory, static_memory_of
from megatron.oases.cost.model import Collective, CostModel, Group
from megatron.oases.cost.simulator import collective_of
from megatron.oases.cost.workload import Workload
from megatron.oases.planner.problem import Choice, ChoiceCost, Pass, Problem, Segment, Table
from megatron.oases.schedule import Kind, Layout, Operation, Part, Role

_MOST_SEGMENTS = 8  # of layers: so many are solved in seconds, and twice as many gained 0.2 % on 96 layers
_WGRADS = (Kind.WGRAD, Kind.ROW_WGRAD)


def legal_degrees(workload: Workload) -> tuple[int, ...]:
    """The degrees that a block can have: divisors of T whose sub-groups divide every sub-batch."""
    samples = set(workload.sub_batch_sizes())
    return tuple(
        degree
        for degree in range(1, workload.tensor + 1)
        if workload.tensor % degree == 0 and not any(size % (workload.tensor // degree) for size in samples)
    )


def problem_of(
    cost: CostModel,
    workload: Workload,
    *,
    degrees: Sequence[int],
    recomputation: Sequence[bool],
    overlaps: bool,
    memory_bytes: int | None,
) -> Problem:
    """The problem of choosing a plan for `workload`, whose TP degree is T.

    Args:
        cost: times of single operations.
        workload: without pipeline parallelism.
        degrees: that blocks may have.
        recomputation: whether they may be kept, recomputed, or both.
        overlaps: whether the schedule hides communication.
        memory_bytes: of a device.
    """
    assert workload.pipeline == 1
    tables = _Tables(cost, workload, overlaps=overlaps)
    choices = [Choice(degree, recomputed) for degree in degrees for recomputed in recomputation]
    layer = tuple({choice: tables.cost(role, choice) for choice in choices} for role in (Role.ATTENTION, Role.MLP))
    ends: list[Table] = [
        {Choice(workload.tensor): tables.cost(role, Choice(workload.tensor))} for role in (Role.EMBEDDING, Role.HEAD)
    ]
    return Problem(
        segments=(
            Segment(parts=(ends[0],)),
            *(Segment(parts=layer, repeats=repeats) for repeats in segment_sizes(workload.model.layers)),
            Segment(parts=(ends[1],)),
        ),
        sub_batches=workload.sub_batches,
        overlaps=overlaps,
        micro_batches=workload.micro_batches,
        redistribution_ms={
            (before, after): (tables.widening_ms(before, after), tables.widening_ms(after, before))
            for before in {*degrees, workload.tensor}
            for after in {*degrees, workload.tensor}
            if before != after
        },
        fixed_ms=cost.iteration_overhead_ms(workload.micro_batches) + cost.optimizer_ms(0),
        memory_bytes=memory_bytes,
    )


def segment_sizes(layers: int) -> list[int]:
    """How many layers are tied together in each segment."""
    segments = min(layers, _MOST_SEGMENTS)
    base, larger = divmod(layers, segments)
    return [base + (i < larger) for i in range(segments)]


@dataclass(frozen=True)
class _Tables:
    cost_model: CostModel
    workload: Workload
    overlaps: bool

    def cost(self, role: Role, choice: Choice) -> ChoiceCost:
        one = _OnePart(self, role, choice)
        return ChoiceCost(
            forward=one.forward(),
            backward=one.backward(),
            once_ms=self._once_ms(role, choice.degree),
            kept_bytes=self._static_bytes(role, choice.degree) + one.kept_bytes,
            working_bytes=one.working_bytes,
        )

    def widening_ms(self, before: int, after: int) -> float:
        """From degree `before` to a larger one every rank gathers more of the batch. To a smaller one it keeps a slice.

        In backward it is the other way round.
        """
        if after <= before:
            return 0.0
        samples = self.workload.micro_batch * after // self.workload.tensor
        group = Group(after // before, stride=before)
        count = self.workload.sub_batches
        whole_bytes = self.workload.hidden_bytes(samples) // count
        return count * self.cost_model.collective_ms(Collective.ALL_GATHER, group, whole_bytes)

    def _static_bytes(self, role: Role, degree: int) -> int:
        parameters = self.workload.model.parameters(role, degree=degree)
        return static_memory_of(self.workload, parameters).total_bytes

    def _once_ms(self, role: Role, degree: int) -> float:
        cost, workload = self.cost_model, self.workload
        parameters = workload.model.parameters(role, degree=degree)
        gradient_bytes = parameters * workload.gradient_bytes
        sub_groups = Group(workload.tensor // degree, stride=degree)
        once_ms = 0.0
        if sub_groups.size > 1:
            once_ms += cost.collective_ms(Collective.ALL_REDUCE, sub_groups, gradient_bytes)
        if workload.data > 1:
            once_ms += cost.collective_ms(Collective.ALL_REDUCE, workload.data_group, gradient_bytes)
        updated = -(-parameters // workload.data) if workload.distributed_optimizer else parameters
        return once_ms + cost.optimizer_ms(updated) - cost.optimizer_ms(0)


class _OnePart:
    """One part at one degree, on its own share of the samples."""

    def __init__(self, tables: _Tables, role: Role, choice: Choice):
        workload = tables.workload
        self._sub_groups = workload.tensor // choice.degree
        self._cost, self._degree = tables.cost_model, choice.degree
        self._workload = replace(
            workload, tensor=choice.degree, micro_batch=workload.micro_batch // self._sub_groups
        )
        self._sizes = self._workload.sub_batch_sizes()
        self._part = Part(role, choice.recomputed)
        # Its neighbours stand beside it, so that no block is the beginning or the end of a stage.
        block = self._part if self._part.is_block else Part(Role.ATTENTION)
        chain = (Part(Role.EMBEDDING), block, Part(Role.HEAD))
        self._place = chain.index(self._part)
        self._layout = Layout(
            chain=chain,
            sub_batches=self._workload.sub_batches,
            sequence_parallel=workload.sequence_parallel and choice.degree > 1,
            recomputes_row_parallel=not tables.overlaps,
            repeats_collectives=not tables.overlaps,
        )
        self._memory = ActivationMemory(self._workload, self._layout, self._sizes)
        self._forward = self._kinds(self._layout.forward_kinds(self._place))
        self._backward = self._kinds(self._layout.backward_kinds(self._place))
        self._recompute = self._kinds(self._layout.recompute_kinds(self._place))

    def forward(self) -> Pass[float]:
        joint_ms = self._joint_ms(Kind.LOSS) if self._part.role is Role.HEAD else 0.0
        return Pass(
            compute_ms=self._compute_ms(self._forward) + joint_ms, transfer_ms=self._transfer_ms(self._forward)
        )

    def backward(self) -> Pass[float]:
        joint_ms = self._joint_ms(Kind.LOSS_GRAD) if self._part.role is Role.HEAD else 0.0
        joint_ms += self._joint_ms(Kind.WGRAD) if self._part.role is Role.EMBEDDING else 0.0
        chain = [operation for operation in self._backward if operation.kind not in _WGRADS]
        wgrads = [operation for operation in self._backward if operation.kind in _WGRADS]
        return Pass(
            compute_ms=self._compute_ms(chain) + joint_ms,
            transfer_ms=self._transfer_ms(self._backward) + self._transfer_ms(self._recompute),
            ahead_ms=self._compute_ms(self._recompute),
            movable_ms=self._compute_ms(wgrads),
        )

    @property
    def kept_bytes(self) -> int:
        """Activations from forward to backward."""
        return max(sum(self._memory.effect(operation).after_bytes for operation in self._forward), 0)

    @property
    def working_bytes(self) -> int:
        """The most that one of its operations adds, on top of what recomputation has brought back."""
        recomputed = sum(self._memory.effect(operation).after_bytes for operation in self._recompute)
        operations = (*self._forward, *self._recompute, *self._backward)
        return max(recomputed, 0) + max(self._memory.effect(operation).during_bytes for operation in operations)

    def _kinds(self, kinds: Sequence[Kind]) -> list[Operation]:
        return [Operation(kind, self._place, i) for i in range(len(self._sizes)) for kind in kinds]

    def _compute_ms(self, operations: Sequence[Operation]) -> float:
        return sum(
            self._ms(operation.kind, self._sizes[operation.sub_batch])
            for operation in operations
            if not operation.kind.is_communication
        )

    def _joint_ms(self, kind: Kind) -> float:
        return self._ms(kind, self._workload.micro_batch)

    def _ms(self, kind: Kind, samples: int) -> float:
        return self._cost.compute_ms(
            self._layout.computes_as(kind), self._part, degree=self._degree, samples=samples
        )

    def _transfer_ms(self, operations: Sequence[Operation]) -> float:
        return sum(
            self._cost.collective_ms(
                collective_of(operation.kind, self._part.role, self._workload),
                Group(self._degree),
                self._workload.hidden_bytes(self._sizes[operation.sub_batch]),
            )
            for operation in operations
            if operation.kind.is_communication and self._degree > 1
        )
