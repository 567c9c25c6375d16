"""The cost model that needs no measurement: a cluster file and the shape of the model are all it knows.

Each operation is a list of kernels, as Megatron's unfused layers run them. Traffic is counted in passes: how often a
kernel reads or writes each element of a tensor (a mask of bytes counts a quarter). A profile measured on the cluster is
more exact.
"""

from collections.abc import Iterable

from megatron.oases.cost.cluster import DTYPES, Cluster
from megatron.oases.cost.kernels import Kernels
from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.topology import Topology
from megatron.oases.cost.workload import Workload
from megatron.oases.errors import UsageError
from megatron.oases.schedule import Kind, Part, Role

_ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
# Fused attention reaches less than a plain matrix product (its softmax runs on other units): an estimate.
_FUSED_ATTENTION_SHARE = 0.6
_DROPOUT = 2.25  # reads, writes, and a mask of bytes
# Traffic for each parameter, in fp32 values: zeroing 1; Adam reads gradient, two moments and weight, and writes the
# last three; for clipping the norm reads 1, and scaling takes 2.
_ADAM_VALUES = 1 + 7
_CLIPPING_VALUES = 1 + 2

Times = Iterable[float]


class RooflineCost:
    """A `CostModel` from a cluster file.

    Args:
        cluster: on whose first devices the workload runs.
        workload: the model and its layout.
        dtype: of matrix products: `fp32`, `tf32`, `bf16` or `fp16`. Default: `fp32`, or `bf16` for two bytes an
            element.
        clips_gradients: whether the optimizer takes their norm and scales them.

    Raises:
        UsageError: the workload does not fit on the cluster, or its devices do not know the dtype.
    """

    def __init__(
        self, cluster: Cluster, workload: Workload, *, dtype: str | None = None, clips_gradients: bool = True
    ):
        model = workload.model
        dtype = dtype or {2: "bf16", 4: "fp32"}[model.element_bytes]
        if dtype not in DTYPES or _ELEMENT_BYTES[dtype] != model.element_bytes:
            raise ValueError(f"dtype {dtype} for elements of {model.element_bytes} bytes")
        if dtype not in cluster.device.achievable_tflops:
            known = ", ".join(cluster.device.achievable_tflops)
            raise UsageError(f"cluster {cluster.name}: device.achievable_tflops has no {dtype}, only {known}")
        if workload.world_size > cluster.world_size:
            raise UsageError(
                f"TP {workload.tensor} x PP {workload.pipeline} x DP {workload.data} = {workload.world_size} ranks, "
                f"but cluster {cluster.name} has {cluster.servers} servers x {cluster.devices_per_server} devices = "
                f"{cluster.world_size}"
            )
        self._cluster = cluster
        self._workload = workload
        self._model = model
        self._optimizer_values = _ADAM_VALUES + (_CLIPPING_VALUES if clips_gradients else 0)
        self._kernels = Kernels(device=cluster.device, dtype=dtype, element_bytes=model.element_bytes)
        self._topology = Topology(cluster, workload.world_size)
        # Fused attention leaves out what is masked.
        self._keys = model.sequence if model.stores_scores else model.sequence / 2

    def compute_ms(self, kind: Kind, part: Part, *, degree: int, samples: int, pieces: int = 1) -> float:
        role = part.role
        if degree < 1 or samples < 1:
            raise ValueError(f"{kind.value} of the {role.value} at degree {degree} on {samples} samples")
        tokens = self._model.sequence * samples
        if kind in (Kind.ROW, Kind.COLUMN_GRAD):
            return self._kernels.sequence_ms([self._decomposed(kind, role, degree, tokens / pieces)])
        match role:
            case Role.EMBEDDING:
                kernels = self._embedding(kind, degree, tokens)
            case Role.HEAD:
                kernels = self._head(kind, degree, tokens)
            case _:
                kernels = self._block(kind, role, degree, tokens, samples)
        if kernels is None:
            raise ValueError(f"the {role.value} has no operation {kind.value} that computes")
        return self._kernels.sequence_ms(list(kernels))

    def collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        return self._topology.collective_ms(collective, group, size_bytes)

    def optimizer_ms(self, parameters: int) -> float:
        half_bytes = self._model.element_bytes if self._model.element_bytes < 4 else 0
        return self._kernels.traffic_ms(parameters * (4 * self._optimizer_values + half_bytes))

    def iteration_overhead_ms(self, micro_batches: int) -> float:
        return self._cluster.iteration_overhead_ms

    def contention(self, group: Group) -> Contention:
        return self._cluster.contention if group.size > 1 else Contention()

    # Blocks.

    def _block(self, kind: Kind, role: Role, degree: int, tokens: float, samples: int) -> Times | None:
        h = self._model.hidden_size
        apart = self._workload.sequence_parallel
        held = tokens / degree if apart else tokens  # between the blocks
        column, row = self._widths(role, degree)
        middle, middle_grad = self._middle(role, degree, tokens, samples)
        matmul, each = self._kernels.matmul_ms, self._kernels.elementwise_ms
        match kind:
            case Kind.FORWARD | Kind.RECOMPUTE:
                norm = [] if apart else self._norm(held)
                row_parallel = [matmul(tokens, h, row)] if kind is Kind.FORWARD else []
                return [*norm, matmul(tokens, column, h), *middle, *row_parallel]
            case Kind.DGRAD:
                join_grad = [] if apart else self._join_grad(held)
                return [*join_grad, matmul(tokens, row, h), *middle_grad, matmul(tokens, h, column)]
            case Kind.WGRAD:
                bias = [each(tokens * column, 1)] if self._model.bias else []
                return [matmul(column, h, tokens, accumulates=True), *bias]
            case Kind.ROW_WGRAD:
                bias = [each(held * h, 1)] if self._model.bias else []
                return [matmul(h, row, tokens, accumulates=True), *bias]
            case Kind.JOIN:
                bias = [each(held * h, 2)] if self._model.bias else []
                return [*bias, *self._hidden_dropout(held), each(held * h, 3)]
            case Kind.NORM_GRAD:
                return [*self._norm_grad(held), each(held * h, 3)]  # plus the residual's gradient
            case Kind.NORM | Kind.RENORM if apart:
                return self._norm(held)
            case Kind.JOIN_GRAD if apart:
                return self._join_grad(held)
        return None

    def _decomposed(self, kind: Kind, role: Role, degree: int, tokens: float) -> float:
        """The row-parallel GEMM, or that of the gradient of the column-parallel linear's input."""
        h = self._model.hidden_size
        if role is Role.HEAD:
            return self._kernels.matmul_ms(tokens, h, self._model.padded_vocabulary / degree)
        column, row = self._widths(role, degree)
        return self._kernels.matmul_ms(tokens, h, row if kind is Kind.ROW else column)

    def _widths(self, role: Role, degree: int) -> tuple[float, float]:
        """Outputs of the column-parallel linear, inputs of the row-parallel one, of one rank."""
        model = self._model
        if role is Role.ATTENTION:
            return model.qkv_width / degree, model.heads * model.head_size / degree
        return model.column_width / degree, model.ffn_hidden_size / degree

    def _middle(self, role: Role, degree: int, tokens: float, samples: int) -> tuple[list[float], list[float]]:
        """What lies between the two linears, forward and backward."""
        column, row = self._widths(role, degree)
        each = self._kernels.elementwise_ms
        if role is Role.ATTENTION:
            # Queries, keys and values are copied apart on the way in, and the context on the way out.
            copies = [each(tokens * column / 3, 2)] * 3 + [each(tokens * row, 2)]
            forward, backward = self._attention(self._model.heads / degree * samples)
            return [*copies, *forward], [*copies, *backward]
        bias = [each(tokens * column, 2)] if self._model.bias else []
        if self._model.gated_mlp:  # activation of one half, product of both
            return [*bias, each(tokens * row, 2), each(tokens * row, 3)], [each(tokens * row, 5), each(tokens * row, 3)]
        return [*bias, each(tokens * row, 2)], [each(tokens * row, 3)]

    def _attention(self, heads: float) -> tuple[list[float], list[float]]:
        """Core attention of `heads` heads, all samples' together, forward and backward."""
        positions, keys, d = self._model.sequence, self._keys, self._model.head_size
        matmul, each = self._kernels.matmul_ms, self._kernels.elementwise_ms
        if not self._model.stores_scores:
            # Two products forward; five backward, two of them the forward's again.
            product = matmul(positions, keys, d, batch=heads) / _FUSED_ATTENTION_SHARE
            return [2 * product], [5 * product]
        scores = heads * positions * keys
        products = [matmul(positions, keys, d, batch=heads), matmul(positions, d, keys, batch=heads)]
        dropout = self._dropout_of(scores) if self._workload.attention_dropout else []
        forward = [*products, each(scores, 2), each(scores, 2), *dropout]  # mask and scale, softmax
        backward = [*products, *products, each(scores, 2), each(scores, 3), *dropout]
        return forward, backward

    # The two ends.

    def _embedding(self, kind: Kind, degree: int, tokens: float) -> Times | None:
        h, each = self._model.hidden_size, self._kernels.elementwise_ms
        held = tokens / degree if self._workload.sequence_parallel else tokens
        match kind:
            case Kind.FORWARD:  # look-up, and zero where the token is another rank's
                return [each(tokens * h, 2)] + ([each(tokens * h, 2)] if degree > 1 else [])
            case Kind.JOIN:
                positions = [each(held * h, 2), each(held * h, 3)] if self._model.learned_positions else []
                return [*positions, each(held * h, 2), *self._hidden_dropout(held)]
            case Kind.WGRAD:  # a matrix of zeros, its rows, and adding it to the gradient
                weight = self._model.padded_vocabulary / degree * h
                add = self._kernels.traffic_ms(weight * (self._model.element_bytes + 8))
                return [*self._hidden_dropout(held), each(weight, 1), each(tokens * h, 3), add]
        return None

    def _head(self, kind: Kind, degree: int, tokens: float) -> Times | None:
        h, vocabulary = self._model.hidden_size, self._model.padded_vocabulary / degree
        apart = self._workload.sequence_parallel
        held = tokens / degree if apart else tokens
        matmul, logits = self._kernels.matmul_ms, tokens * vocabulary
        match kind:
            case Kind.FORWARD:
                return [*([] if apart else self._norm(held)), matmul(tokens, vocabulary, h)]
            case Kind.NORM if apart:
                return self._norm(held)
            case Kind.LOSS:  # in fp32: joining, casting, maximum, difference, exponential, sum, division
                return [self._kernels.traffic_ms(logits * 4 * passes) for passes in (2, 2, 1, 2, 2, 1, 2)]
            case Kind.LOSS_GRAD:
                return [self._kernels.traffic_ms(logits * 4 * passes) for passes in (2, 2)]
            case Kind.DGRAD:
                return [matmul(tokens, h, vocabulary)]
            case Kind.WGRAD:
                return [matmul(vocabulary, h, tokens, accumulates=True)]
            case Kind.NORM_GRAD:
                return self._norm_grad(held)
        return None

    # What parts have in common.

    def _norm(self, tokens: float) -> list[float]:
        return [self._kernels.elementwise_ms(tokens * self._model.hidden_size, 2)]

    def _norm_grad(self, tokens: float) -> list[float]:
        # Input and gradient in, gradient out; the norm's own weights take one more pass.
        return [self._kernels.elementwise_ms(tokens * self._model.hidden_size, 4)]

    def _join_grad(self, tokens: float) -> list[float]:
        return self._hidden_dropout(tokens)

    def _hidden_dropout(self, tokens: float) -> list[float]:
        return self._dropout_of(tokens * self._model.hidden_size) if self._workload.hidden_dropout else []

    def _dropout_of(self, elements: float) -> list[float]:
        return [self._kernels.elementwise_ms(elements, _DROPOUT)]
