"""The speed-ups of the paper (Li et al., TPDS 2025): its figures, and ours under stated assumptions, simulated.

The paper does not say which TP degree, batch and layout each bar was measured with. One rule for all rows stands in for that,
and how far the answer depends on it is part of the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from scipy.stats import kendalltau

from megatron.oases.cost.prediction import FlagParser, predict
from megatron.oases.cost.sources import cluster_source
from megatron.oases.errors import UsageError
from megatron.oases.planner.planning import Planning
from megatron.oases.planner.report import degrees_of
from megatron.oases.report.systems import RECOMPUTE, planned_flags

SYSTEMS = ("megatron", "alpa", "wang", "merak", "oases")
BASELINES = SYSTEMS[:-1]
# The cluster files, and what the paper calls them.
CLUSTERS = {"rtx3090x4_nvlink": "NVLink", "rtx3090x4": "no NVLink"}
# (hidden size, layers)
MODELS = ((1024, 24), (2048, 24), (3072, 24), (4096, 16), (6144, 16), (8192, 8), (12288, 4))
# Throughput relative to Megatron-LM, in the order of SYSTEMS, a row a model: read off the figures of the authors' public
# repository (lucasleesw/oases). Its extremes are those of the abstract of arXiv 2305.16121v2.
PAPER = {
    "rtx3090x4_nvlink": (
        (1.00, 1.05, 0.95, 1.05, 1.06),
        (1.00, 1.05, 1.30, 1.19, 1.62),
        (1.00, 1.06, 1.17, 1.17, 1.45),
        (1.00, 1.04, 1.16, 1.18, 1.39),
        (1.00, 1.05, 1.09, 1.27, 1.59),
        (1.00, 1.05, 1.05, 1.25, 1.63),
        (1.00, 0.97, 0.88, 1.27, 1.58),
    ),
    "rtx3090x4": (
        (1.00, 0.96, 1.18, 1.28, 1.53),
        (1.00, 1.11, 1.34, 1.27, 1.95),
        (1.00, 1.09, 1.21, 1.26, 1.78),
        (1.00, 1.11, 1.22, 1.28, 1.73),
        (1.00, 1.03, 1.02, 1.26, 1.67),
        (1.00, 1.01, 0.98, 1.18, 1.71),
        (1.00, 1.05, 0.90, 1.22, 1.81),
    ),
}
_SEQUENCE = 1024
_VOCABULARY = 50257  # GPT-2's
_HEAD_SIZE, _FEWEST_HEADS = 128, 16
_PIECES = (2, 4, 8)  # of them the fastest counts, as the original chooses by measurement


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the paper leaves open, the same for every row. All layers are recomputed, as in the paper.

    Args:
        name: for tables.
        least_tensor: the TP degree is the smallest power of two from here on at which all systems fit into memory.
        devices: all of them are used, TP times data-parallel.
        micro_batch: samples of a micro-batch.
        micro_batches: of an iteration, on each replica.
        products: how fp32 matrix products are computed.
    """

    name: str
    least_tensor: int = 2
    devices: int = 32
    micro_batch: int = 8
    micro_batches: int = 4
    products: str = "tf32"

    def flags(self, model: tuple[int, int], tensor: int) -> list[str]:
        """Of pretrain_gpt.py, for one of the models, at a TP degree."""
        hidden_size, layers = model
        heads = max(_FEWEST_HEADS, hidden_size // _HEAD_SIZE)
        global_batch = self.micro_batch * self.micro_batches * self.devices // tensor
        return planned_flags(
            f"--num-layers {layers} --hidden-size {hidden_size} --num-attention-heads {heads} --seq-length {_SEQUENCE} "
            f"--max-position-embeddings {_SEQUENCE} --vocab-size {_VOCABULARY} --micro-batch-size {self.micro_batch} "
            f"--global-batch-size {global_batch} --tensor-model-parallel-size {tensor} "
            "--hidden-dropout 0 --attention-dropout 0".split()
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one cluster: iteration times in ms, by system."""

    cluster: str
    model: tuple[int, int]
    devices: int
    tensor: int
    times_ms: Mapping[str, float]
    degrees: str  # of the plan of oases

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.devices // self.tensor

    @property
    def speedups(self) -> dict[str, float]:
        return {system: self.times_ms["megatron"] / self.times_ms[system] for system in SYSTEMS}

    @property
    def paper(self) -> dict[str, float]:
        return dict(zip(SYSTEMS, PAPER[self.cluster][MODELS.index(self.model)], strict=True))

    @property
    def error(self) -> float:
        """Mean absolute difference of the speed-ups, over all systems but the one that is 1 by definition."""
        return mean(abs(self.speedups[system] - self.paper[system]) for system in SYSTEMS[1:])

    @property
    def rank_agreement(self) -> float:
        """Kendall's tau between our order of the five systems and the paper's: 1 if equal, -1 if reversed."""
        ours, papers = ([values[system] for system in SYSTEMS] for values in (self.speedups, self.paper))
        return float(kendalltau(ours, papers).statistic)

    @property
    def best_baseline(self) -> str:
        return max(BASELINES, key=self.speedups.get)

    @property
    def best_baseline_agrees(self) -> bool:
        """Whether it is the paper's, or within 0.05 of that."""
        papers = max(BASELINES, key=self.paper.get)
        return self.speedups[self.best_baseline] - self.speedups[papers] <= 0.05

    @property
    def oases_is_fastest(self) -> bool:
        return all(self.speedups["oases"] > self.speedups[system] for system in BASELINES)


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """All rows under one set of assumptions."""

    assumptions: Assumptions
    rows: Sequence[Row]

    @property
    def error(self) -> float:
        return mean(row.error for row in self.rows)

    @property
    def oases_error(self) -> float:
        return mean(abs(row.speedups["oases"] - row.paper["oases"]) for row in self.rows)

    @property
    def oases_fastest(self) -> int:
        return sum(row.oases_is_fastest for row in self.rows)

    @property
    def best_baselines_agree(self) -> int:
        return sum(row.best_baseline_agrees for row in self.rows)


def simulate_row(cluster: str, model: tuple[int, int], assumptions: Assumptions, parser: FlagParser) -> Row:
    """One row. Raises `UsageError` where the systems fit into memory at no TP degree."""
    tensor = assumptions.least_tensor
    while tensor <= assumptions.devices:
        row = _row_at(tensor, cluster, model, assumptions, parser)
        if row is not None:
            return row
        tensor *= 2
    raise UsageError(f"hidden size {model[0]}, {model[1]} layers: '{assumptions.name}' fits at no TP degree")


def _row_at(
    tensor: int, cluster: str, model: tuple[int, int], assumptions: Assumptions, parser: FlagParser
) -> Row | None:
    """None where a system does not fit into memory."""
    source = cluster_source(cluster, fp32_as=assumptions.products)
    flags, world_size = assumptions.flags(model, tensor), assumptions.devices
    decomposed = [f"wang --oases-pieces {pieces}" for pieces in _PIECES]
    times_ms = {}
    for systems in (["megatron"], ["merak", *decomposed]):  # mostly the first already tells that there is too little memory
        predicted = predict(
            [*flags, *RECOMPUTE["full"]],
            systems,
            source,
            parser=parser,
            world_size=world_size,
            record=False,
            announce=lambda line: None,
        )
        if any(prediction.peak_bytes > source.memory_bytes for prediction in predicted.values()):
            return None
        times_ms |= {name: prediction.iteration_ms for name, prediction in predicted.items()}
    for system in ("alpa", "oases"):
        planning = Planning(
            flags, source, parser, system=system, recompute="full", sub_batches=(2,), memory_bytes=source.memory_bytes
        )
        try:
            best = planning.best(world_size=world_size, solutions=1)[0]
        except UsageError:  # no plan fits
            return None
        times_ms[system] = best.simulated.iteration_ms
    times_ms["wang"] = min(times_ms.pop(name) for name in decomposed)
    layout = {"devices": world_size, "tensor": tensor}
    return Row(cluster=cluster, model=model, **layout, times_ms=times_ms, degrees=degrees_of(best.layers))


ASSUMED = Assumptions(name="assumed")
# To see how far the answer depends on it: each differs in one respect.
OTHERS = (
    replace(ASSUMED, name="TP from 4 on", least_tensor=4),
    replace(ASSUMED, name="TP from 8 on", least_tensor=8),
    replace(ASSUMED, name="micro-batch 4", micro_batch=4),
    replace(ASSUMED, name="1 micro-batch", micro_batches=1),
    replace(ASSUMED, name="products in fp32, not TF32", products="fp32"),
)


def rows_of(assumptions: Assumptions) -> list[tuple[str, tuple[int, int], Assumptions]]:
    """The arguments of `simulate_row` for both tables."""
    return [(cluster, model, assumptions) for cluster in CLUSTERS for model in MODELS]
