"""Properties of the cost model that knows a cluster file only, and its error against published times."""

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.oases.cost.cluster_file import load_cluster, shipped_clusters
from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.roofline import RooflineCost
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.errors import UsageError
from megatron.oases.schedule import Kind, Layout, Part, Role
from tests.unit import stand_in_cost

PROFILE = Path(__file__).parents[3] / "shared/data/rtx3090_published_profile.csv"
BLOCKS = (Role.ATTENTION, Role.MLP)


def shape(hidden_size: int = 1024, **changes) -> ModelShape:
    values = dict(
        layers=2,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        heads=hidden_size // 64,
        query_groups=hidden_size // 64,
        head_size=64,
        sequence=1024,
        padded_vocabulary=51200,
    )
    return stand_in_cost.shape(**(values | changes))


def workload(model: ModelShape | None = None, **changes) -> Workload:
    values = dict(micro_batch=4, recompute="full", sub_batches=1)
    return stand_in_cost.workload(model or shape(), **(values | changes))


def cost(cluster: str = "rtx3090x4", *, model: ModelShape | None = None, dtype=None, **changes) -> RooflineCost:
    """With all that takes time."""
    dropout = dict(hidden_dropout=True, attention_dropout=True)
    return RooflineCost(load_cluster(cluster), workload(model, **(dropout | changes)), dtype=dtype)


def computing(sequence_parallel: bool) -> list[tuple[Kind, Role]]:
    """All that a schedule may ask for."""
    asked = set()
    for repeats in (False, True):
        layout = Layout(
            chain=workload().chain(0, keeps_last_layer=False),
            sub_batches=1,
            sequence_parallel=sequence_parallel,
            recomputes_row_parallel=repeats,
            repeats_collectives=repeats,
        )
        for operation in layout.forward_operations() | layout.backward_operations():
            if not operation.kind.is_communication:
                asked.add((layout.computes_as(operation.kind), layout.chain[operation.place].role))
    return sorted(asked, key=str)


ALL = [(sequence_parallel, *asked) for sequence_parallel in (False, True) for asked in computing(sequence_parallel)]
MODELS = {
    "gpt": shape(),
    "llama": shape(
        gated_mlp=True, bias=False, learned_positions=False, rms_norm=True, query_groups=4, stores_scores=False
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sequence_parallel, kind, role", ALL)
class TestEveryOperation:
    def test_is_known_and_takes_longer_with_more_samples(self, model, sequence_parallel, kind, role):
        known = cost(model=model, sequence_parallel=sequence_parallel)
        times = [known.compute_ms(kind, Part(role), degree=2, samples=samples) for samples in (1, 2, 3, 8, 64)]
        assert times[0] > 0
        assert times == sorted(times) and times[-1] > times[0]

    def test_takes_longer_in_a_wider_model(self, model, sequence_parallel, kind, role):
        times = [
            cost(
                model=replace(model, hidden_size=h, ffn_hidden_size=4 * h, heads=h // 64),
                sequence_parallel=sequence_parallel,
            ).compute_ms(kind, Part(role), degree=2, samples=16)
            for h in (512, 1024, 2048, 8192)
        ]
        assert times == sorted(times)
        assert times[-1] > times[0] or kind in (Kind.LOSS, Kind.LOSS_GRAD)

    def test_takes_no_longer_at_a_higher_degree(self, model, sequence_parallel, kind, role):
        known = cost(model=model, sequence_parallel=sequence_parallel)
        one, two, four = (known.compute_ms(kind, Part(role), degree=degree, samples=8) for degree in (1, 2, 4))
        # Zeroing what other ranks look up is work that degree 1 does not have.
        assert one >= two or (kind, role) == (Kind.FORWARD, Role.EMBEDDING)
        assert two >= four

    def test_is_never_cheaper_in_parts(self, model, sequence_parallel, kind, role):
        known = cost(model=model, sequence_parallel=sequence_parallel)
        whole = known.compute_ms(kind, Part(role), degree=2, samples=8)
        for parts in ([4, 4], [3, 3, 2], [7, 1], [1] * 8):
            cut = sum(known.compute_ms(kind, Part(role), degree=2, samples=part) for part in parts)
            assert cut >= whole * (1 - 1e-12)


@pytest.mark.parametrize("role", BLOCKS)
def test_recomputation_leaves_out_the_row_parallel_product(role):
    known, options = cost(), dict(degree=2, samples=4)
    forward, recompute = (known.compute_ms(kind, Part(role), **options) for kind in (Kind.FORWARD, Kind.RECOMPUTE))
    assert 0.4 * forward < recompute < forward


@pytest.mark.parametrize("role", BLOCKS)
def test_sequence_parallelism_moves_norm_and_dropout_out_of_the_core(role):
    options = dict(degree=4, samples=32)
    plain, apart = cost(tensor=4), cost(tensor=4, sequence_parallel=True)
    for core, moved in ((Kind.FORWARD, Kind.NORM), (Kind.RECOMPUTE, Kind.RENORM), (Kind.DGRAD, Kind.JOIN_GRAD)):
        left_out = plain.compute_ms(core, Part(role), **options) - apart.compute_ms(core, Part(role), **options)
        assert left_out == pytest.approx(4 * apart.compute_ms(moved, Part(role), **options))  # a quarter of the sequence
        with pytest.raises(ValueError, match=f"{role.value} has no operation {moved.value}"):
            plain.compute_ms(moved, Part(role), **options)
    assert apart.compute_ms(Kind.JOIN, Part(role), **options) < plain.compute_ms(Kind.JOIN, Part(role), **options)


@pytest.mark.parametrize(
    "dropout, kind, role",
    [
        ("hidden_dropout", Kind.JOIN, Role.ATTENTION),
        ("hidden_dropout", Kind.JOIN, Role.EMBEDDING),
        ("attention_dropout", Kind.FORWARD, Role.ATTENTION),
        ("attention_dropout", Kind.DGRAD, Role.ATTENTION),
    ],
)
def test_each_dropout_takes_time_where_it_is_and_no_other_does(dropout, kind, role):
    with_all, without, alone = (
        cost(**{"hidden_dropout": others, "attention_dropout": others, dropout: own}).compute_ms(
            kind, Part(role), degree=1, samples=8
        )
        for own, others in ((True, True), (False, True), (True, False))
    )
    assert without < with_all
    if kind is not Kind.DGRAD:  # which has hidden dropout's, too
        assert alone == with_all


def test_skinny_products_reach_less_than_large_ones():
    known = cost(model=shape(hidden_size=8192), tensor=1)

    def reached(degree: int, samples: int) -> float:
        operations = 2 * 2 * 1024 * samples * 8192 * 4 * 8192 / degree
        return operations / known.compute_ms(Kind.FORWARD, Part(Role.MLP), degree=degree, samples=samples)

    assert reached(degree=64, samples=1) < 0.9 * reached(degree=1, samples=1)
    assert reached(degree=1, samples=1) < 35.6e9


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_cluster_prices_a_model(name):
    where = load_cluster(name)
    known = cost(name)
    assert known.compute_ms(Kind.FORWARD, Part(Role.MLP), degree=2, samples=1) > 0
    assert known.collective_ms(Collective.ALL_REDUCE, Group(2), 2**20) > 0
    assert known.iteration_overhead_ms(1) == where.iteration_overhead_ms
    assert known.contention(Group(2)) == where.contention
    assert known.contention(Group(1)) == Contention()


def test_the_optimizer_takes_its_parameters_over_the_memory():
    known = cost()
    # 11 fp32 values at 85 % of 936 GB/s; 8 where gradients are not clipped.
    assert known.optimizer_ms(10**9) == pytest.approx(44e9 / (936e6 * 0.85))
    unclipped = RooflineCost(load_cluster("rtx3090x4"), workload(), clips_gradients=False)
    assert unclipped.optimizer_ms(10**9) == pytest.approx(32e9 / (936e6 * 0.85))
    assert known.optimizer_ms(2 * 10**9) == 2 * known.optimizer_ms(10**9)


def test_a_faster_device_is_faster():
    options = dict(degree=2, samples=8)
    model = shape(element_bytes=2)
    times = [
        cost(name, model=model).compute_ms(Kind.FORWARD, Part(Role.MLP), **options)
        for name in ("h100_sxm_x8", "a100_pcie_x8", "rtx3090x4")
    ]
    assert times == sorted(times)


def test_tied_embeddings_over_three_stages():
    """The first and the last stage share a gradient; the stage between them has no part in that group."""
    known = cost(pipeline=3, model=shape(layers=3, tied_embeddings=True))
    system = System(schedule="vanilla", host_sees_completion=False)
    trained = workload(shape(layers=3, tied_embeddings=True), pipeline=3, micro_batches=3)
    assert Simulator(known).predict(trained, system).iteration_ms > 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"TP 4 x PP 2 x DP 8 = 64 ranks, but cluster rtx3090x4 has 8 servers x 4 dev"):
        cost(tensor=4, pipeline=2, data=8)
    with pytest.raises(UsageError, match="cluster emulated: device.achievable_tflops has no bf16, only fp32"):
        cost("emulated", model=shape(element_bytes=2))
    with pytest.raises(ValueError, match="dtype bf16 for elements of 4 bytes"):
        cost(dtype="bf16")
    with pytest.raises(ValueError, match="at degree 1 on 0 samples"):
        cost().compute_ms(Kind.FORWARD, Part(Role.MLP), degree=1, samples=0)


@pytest.mark.skipif(not PROFILE.exists(), reason="the published profile is not at hand")
def test_blocks_are_within_6_percent_of_the_published_profile():
    """The constants were fitted on these rows: this says how well the form of the model holds, not what it predicts."""
    operations = {"fwd": (Kind.FORWARD, Kind.JOIN), "bwd": (Kind.DGRAD, Kind.WGRAD, Kind.ROW_WGRAD, Kind.NORM_GRAD)}
    errors: dict[str, list[float]] = {}
    for row in csv.DictReader(PROFILE.open()):
        degree, samples = int(row["tp_degree"]), int(row["batch_size"])
        if degree > 8:
            continue
        known = cost(model=shape(hidden_size=int(row["hidden_size"])), tensor=degree, dtype="tf32")
        for name, role in (("attn", Role.ATTENTION), ("mlp", Role.MLP)):
            for direction, kinds in operations.items():
                predicted = sum(known.compute_ms(kind, Part(role), degree=degree, samples=samples) for kind in kinds)
                measured = float(row[f"{name}_{direction}_ms"])
                errors.setdefault(f"{name}_{direction}", []).append(abs(predicted / measured - 1))
    for name, of_column in errors.items():
        assert len(of_column) == 69
        assert statistics.median(of_column) < 0.08, name
    everything = sorted(error for of_column in errors.values() for error in of_column)
    assert statistics.median(everything) < 0.06
    assert everything[int(0.9 * len(everything))] < 0.15


@pytest.mark.skipif(not PROFILE.exists(), reason="the published profile is not at hand")
def test_all_reduces_over_32_devices_are_within_30_percent_of_the_published_ones():
    errors = []
    known = cost(tensor=32)
    for row in csv.DictReader(PROFILE.open()):
        size_bytes = 4 * 1024 * int(row["batch_size"]) * int(row["hidden_size"])
        predicted = known.collective_ms(Collective.ALL_REDUCE, Group(32), size_bytes)
        errors.append(abs(predicted / float(row["allreduce_ms"]) - 1))
    assert statistics.median(errors) < 0.3
