"""Bytes on one device: what stays for the whole training, and what each operation of a schedule allocates and frees.

Follows what the runtime keeps (docs/architecture.md, "Memory") and, for Megatron, what autograd keeps. Buffers of
libraries, fragmentation and the memory of the process itself are not in it.
"""

from dataclasses import dataclass

from megatron.oases.cost.redistribution import Redistribution
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.schedule import Kind, Layout, Operation, Part, Role

_ADAM_MOMENTS_BYTES = 8  # two, in fp32
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """Bytes that a device holds all the time."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def stage_parameters(workload: Workload, stage: int) -> int:
    """Parameters that one device of a pipeline stage holds. With tied weights the last stage has a copy of its own."""
    model, chain = workload.model, workload.chain(stage, keeps_last_layer=False)
    count = sum(model.parameters(part.role, degree=workload.degree_of(part)) for part in chain)
    if model.tied_embeddings and 0 < stage == workload.pipeline - 1:
        count += word_embedding_parameters(workload)
    return count


def word_embedding_parameters(workload: Workload) -> int:
    """Of one device's share of the vocabulary."""
    return workload.model.padded_vocabulary * workload.model.hidden_size // workload.tensor


def static_memory(workload: Workload, stage: int) -> StaticMemory:
    """Of a device of a pipeline stage."""
    return static_memory_of(workload, stage_parameters(workload, stage))


def static_memory_of(workload: Workload, count: int) -> StaticMemory:
    """Parameters, Megatron's gradient buffer, and Adam: an fp32 copy of half-precision weights and two moments.

    The distributed optimizer divides Adam's part by the data-parallel size.

    Args:
        workload: for types and data-parallel size.
        count: parameters that the device holds.
    """
    element_bytes = workload.model.element_bytes
    master_bytes = _FP32_BYTES if element_bytes < _FP32_BYTES else 0
    sharing = workload.data if workload.distributed_optimizer else 1
    return StaticMemory(
        parameters_bytes=count * element_bytes,
        gradients_bytes=count * workload.gradient_bytes,
        optimizer_bytes=-(-count // sharing) * (_ADAM_MOMENTS_BYTES + master_bytes),
    )


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation does to the device's memory.

    Args:
        during_bytes: the most that it adds while it runs.
        after_bytes: what it leaves allocated, less what it has freed.
    """

    during_bytes: int
    after_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes of the tensors of one sub-batch, of which a block with sub-groups has its share `b`."""

    whole: int  # [s, b, h]
    between: int  # the same between blocks: with sequence parallelism [s/t, b, h]
    core_input: int  # the norm's output, as it is kept
    column: int  # [s, b, ...], output of the column-parallel linear
    row: int  # [s, b, ...], input of the row-parallel linear
    graph: int  # all that the core's graph keeps beside its input
    normalised: int  # inside a norm, where it keeps that
    logits: int  # [s, b, vocabulary/t]
    mask: int  # of the dropout between blocks


class ActivationMemory:
    """The effect of each operation of one pipeline stage.

    Args:
        workload: what is trained.
        layout: what the stage's schedule is made for.
        sizes: samples of each sub-batch.
    """

    def __init__(self, workload: Workload, layout: Layout, sizes: tuple[int, ...]):
        self._workload = workload
        self._layout = layout
        self._sizes = sizes
        self._known: dict[tuple[int, Role, int], _Sizes] = {}

    def effect(self, operation: Operation) -> Effect:
        place, kind = operation.place, operation.kind
        part, layout = self._layout.chain[place], self._layout
        size = self._sizes_of(self._sizes[layout.sub_batch_of(operation)], part)
        gathers = layout.sequence_parallel and part.role is not Role.EMBEDDING
        between = size.between
        begins, ends = place == 0 and not layout.has_embedding, place == len(layout.chain) - 1 and not layout.has_head
        # With sequence parallelism: the norm's output before it is gathered and after, or a tensor before and after a
        # reduce-scatter.
        gathered = size.whole + between if gathers else 0
        scattered = between if layout.sequence_parallel else 0
        is_entered = Kind.ENTER in layout.forward_kinds(place)
        given = between if begins and not is_entered and kind is layout.forward_kinds(place)[0] else 0
        # The norm's graph begins with NORM or RENORM where there is one.
        normalised = 0 if gathers else size.normalised
        graph = 0 if part.recomputed else size.graph + size.core_input + normalised
        match kind:
            case Kind.NORM:
                return _grows(given + between + (0 if part.recomputed else size.normalised))
            case Kind.RENORM:
                return _grows(between + size.normalised)
            case Kind.GATHER | Kind.REGATHER | Kind.GATHER_GRAD | Kind.GATHER_INPUT:
                return _grows(size.whole)
            case Kind.ROW | Kind.REROW | Kind.COLUMN_GRAD:
                return _grows(0)  # a piece of what FORWARD, RECOMPUTE, DGRAD have allocated
            case Kind.REDUCE | Kind.REDUCE_GRAD | Kind.REREDUCE:
                return _grows(scattered)
            case Kind.FORWARD if part.role is Role.EMBEDDING:
                return _grows(size.whole)
            case Kind.FORWARD if part.role is Role.HEAD:
                during = size.core_input + size.logits + normalised
                return Effect(during, during - gathered)
            case Kind.FORWARD:
                during = given + size.core_input + size.graph + size.whole + normalised
                return Effect(during, given + graph + size.whole - gathered)
            case Kind.JOIN:
                drops_x = layout.is_recomputed_from_inside(place)
                mask = 0 if part.recomputed else size.mask
                # A stage's output is gone once it was sent.
                after = (0 if ends else between) - size.whole - scattered - drops_x * between + mask
                return Effect(between + mask, after)
            case Kind.RECOMPUTE:
                output = size.whole if layout.repeats_collectives else 0
                after = size.core_input + size.graph + normalised + output - gathered
                unused = size.whole if layout.recomputes_row_parallel and not output else 0
                return Effect(max(after + unused, 0), after)
            case Kind.REJOIN:
                is_next_x = part.role is Role.ATTENTION and layout.is_recomputed_from_inside(place + 1)
                next_x = between if is_next_x else 0
                return Effect(between, next_x - size.whole - scattered)
            case Kind.LOSS:
                return self._loss()
            case Kind.LOSS_GRAD:
                effect = self._loss()
                return Effect(self._logits_bytes(), -effect.after_bytes)
            case Kind.JOIN_GRAD:
                return _grows(between * ends + (between if size.mask else 0))
            case Kind.DGRAD if part.role is Role.HEAD:
                return _grows(size.whole)
            case Kind.DGRAD:
                # What JOIN_GRAD does where nothing is gathered, it does itself. Behind dropout the gradient is a tensor
                # of its own, which lives until it has been gathered, or else until the weight gradient has used it.
                mask = 0 if part.recomputed else size.mask
                masked = between if size.mask else 0
                handed = -masked if gathers else size.whole * ends + masked
                after = handed + size.column + size.whole - (size.graph - size.row) - mask
                inside = self._largest_inside(size, part.role)
                return Effect(max(handed, 0) + size.whole + size.column + inside, after)
            case Kind.ROW_WGRAD:
                own_gradient = size.whole if gathers or size.mask else 0
                return Effect(0, -size.row - own_gradient)
            case Kind.WGRAD if part.role is Role.EMBEDDING:
                sizes = [self._sizes_of(samples, part) for samples in self._sizes]
                freed = sum(each.between + each.mask for each in sizes)
                dense = word_embedding_parameters(self._workload) * self._workload.model.element_bytes
                return Effect(dense, -freed)
            case Kind.WGRAD:
                output_gradient = size.logits if part.role is Role.HEAD else size.column
                again = size.whole if Kind.GATHER_INPUT in layout.backward_kinds(place) else 0
                return Effect(0, -size.core_input - output_gradient - again)
            case Kind.NORM_GRAD:
                # The part's input and the reduced gradient go. The gradient of the input takes the place of the output's.
                new = between if part.role is Role.HEAD else 0
                handed_on = between if begins and not is_entered else 0
                return Effect(between, new - (size.whole + scattered + between + size.normalised + handed_on))
            case Kind.RESHARD | Kind.ENTER | Kind.RERESHARD | Kind.REENTER | Kind.RESHARD_GRAD | Kind.LEAVE:
                return self._reshard(operation)
        raise AssertionError(f"no memory known for {operation}")

    def _reshard(self, operation: Operation) -> Effect:
        """What arrives takes the place of what was there, beside what was received meanwhile."""
        kind, place, layout = operation.kind, operation.place, self._layout
        samples, chain = self._sizes[layout.sub_batch_of(operation)], layout.chain
        forth = Redistribution(layout.sub_groups_before(place), chain[place].sub_groups)
        back = kind in (Kind.RESHARD_GRAD, Kind.LEAVE)
        step = forth.reversed() if back else forth
        received = step.received_bytes(self._workload, samples)
        source, target = (self._between(samples, count) for count in (step.before, step.after))
        # What a stage is given is kept until it hands the gradient on; what it hands on is gone once it was sent.
        first_kinds = layout.backward_kinds(place) if back else layout.forward_kinds(place)
        is_end = place == (len(chain) - 1 if back else 0) and chain[place].role not in (Role.EMBEDDING, Role.HEAD)
        given = source if is_end and kind is first_kinds[0] else 0
        if kind.is_communication:
            return _grows(given + received)
        after = given + target - source - received
        if place == 0:
            after += -target - target if back else source
        if chain[place].role is Role.EXIT and not back:
            after -= target
        return Effect(given + target, after)

    def _between(self, samples: int, sub_groups: int) -> int:
        """x of one sub-batch on one rank, between blocks of so many sub-groups."""
        workload = self._workload
        return workload.hidden_bytes(samples) // (workload.tensor if workload.sequence_parallel else sub_groups)

    def _loss(self) -> Effect:
        """The logits give way to their softmax in fp32; a schedule keeps half-precision logits with it, as a leaf."""
        model = self._workload.model
        logits = self._logits_bytes()
        softmax = logits // model.element_bytes * _FP32_BYTES
        is_half = model.element_bytes < _FP32_BYTES
        kept = softmax + (logits if is_half and not self._layout.repeats_collectives else 0)
        return Effect(softmax + (logits if is_half else 0), kept - logits)

    def _logits_bytes(self) -> int:
        return sum(self._sizes_of(samples, Part(Role.HEAD)).logits for samples in self._sizes)

    def _largest_inside(self, size: _Sizes, role: Role) -> int:
        """Gradients inside the core that are there at the same time."""
        return 2 * self._scores(size) if role is Role.ATTENTION else size.row

    def _scores(self, size: _Sizes) -> int:
        """[b, heads/t, s, s], where they are stored: `s / head size` times the context."""
        model = self._workload.model
        return size.row * model.sequence // model.head_size if model.stores_scores else 0

    def _sizes_of(self, samples: int, part: Part) -> _Sizes:
        key = samples, part.role, part.sub_groups
        known = self._known.get(key)
        if known is None:
            degree = self._workload.degree_of(part)
            known = self._known[key] = self._measure(samples // part.sub_groups, part.role, degree)
        return known

    def _measure(self, samples: int, role: Role, degree: int) -> _Sizes:
        workload, model = self._workload, self._workload.model
        tokens_bytes = model.sequence * samples * model.element_bytes
        whole = tokens_bytes * model.hidden_size
        between = whole // degree if workload.sequence_parallel else whole
        row_width = model.head_size * model.heads if role is Role.ATTENTION else model.ffn_hidden_size
        column_width = model.qkv_width if role is Role.ATTENTION else model.column_width
        # Megatron keeps its own part of a gathered input, and gathers it again.
        keeps_part = workload.sequence_parallel and self._layout.repeats_collectives
        return _Sizes(
            whole=whole,
            between=between,
            core_input=between if keeps_part else whole,
            column=tokens_bytes * column_width // degree,
            row=tokens_bytes * row_width // degree,
            graph=_graph_bytes(workload, samples, role, degree),
            normalised=between if model.rms_norm and workload.unfused else 0,
            logits=tokens_bytes * model.padded_vocabulary // degree,
            mask=_mask_bytes(workload, between // model.element_bytes) if workload.hidden_dropout else 0,
        )


def _graph_bytes(workload: Workload, samples: int, role: Role, degree: int) -> int:
    """What autograd keeps of a block's core beside its input, by storages: views keep all that they are views of."""
    model = workload.model
    tokens = model.sequence * samples
    if role is Role.MLP:
        # The first linear's output and the second one's input; in pieces, a gated MLP also keeps both factors of that.
        inputs = 3 if model.gated_mlp and workload.unfused else 1
        elements = tokens * (model.column_width + model.ffn_hidden_size * inputs)
        return elements * model.element_bytes // degree
    if role is not Role.ATTENTION:
        return 0
    elements = tokens * _attention_width(model)
    scores = model.heads * samples * model.sequence**2 if model.stores_scores else 0
    # Of dropout: its result, and which scores it dropped.
    dropout_bytes = scores * model.element_bytes + _mask_bytes(workload, scores) if workload.attention_dropout else 0
    return ((elements + scores) * model.element_bytes + dropout_bytes) // degree


def _attention_width(model: ModelShape) -> int:
    """Elements that are kept of each token, scores aside."""
    context, key = model.head_size * model.heads, model.head_size * model.query_groups
    rotated = not model.learned_positions  # then queries and keys are tensors of their own
    if not model.stores_scores:
        return model.qkv_width + (context + key if rotated else 0) + context
    if model.query_groups == model.heads:
        return model.qkv_width + (2 * context if rotated else 0) + context
    # Keys and values are repeated for every query head. Without rotation queries still lie in the linear's output.
    return (context if rotated else model.qkv_width) + 2 * context + context


def _mask_bytes(workload: Workload, elements: int) -> int:
    """On the CPU torch keeps a dropout mask in the tensor's own type."""
    return elements * (workload.model.element_bytes if workload.unfused else 1)


def _grows(size_bytes: int) -> Effect:
    return Effect(size_bytes, size_bytes)
