"""The systems of the paper run for real, on the emulated cluster, with its models scaled down to what a CPU core trains.

Hidden sizes are divided by one number, layers by another, in every model, and no system gets a flag in one model that it does
not get in the others. What the planners choose differs, and for them a device has as much memory as lies halfway between what Megatron
needs at TP 1 and at TP 2: a model is then too large for one device, and some of its blocks are not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic

from megatron.oases.cost.cluster_file import load_cluster
from megatron.oases.cost.prediction import FlagParser, predict
from megatron.oases.cost.records import from_json, read_json_object, to_json, write_json_object
from megatron.oases.cost.sources import CostSource, source_of
from megatron.oases.plan import write_plan
from megatron.oases.planner.planning import Planning
from megatron.oases.planner.report import degrees_of
from megatron.oases.report.bound import Bound
from megatron.oases.report.comparison import WARM_UP_ITERATIONS, median_ms, order_of_runs
from megatron.oases.report.machine import describe_machine
from megatron.oases.report.runs import REPOSITORY, Half, Launcher, Run, run_name, run_once
from megatron.oases.report.systems import RECOMPUTE, shared_flags, system_flags

VERSION = 1
RANKS = 2
PAPER_BASELINES = ("megatron", "alpa", "wang", "merak")
COMPARED = (*PAPER_BASELINES, "domino", "oases")
# What oases is made of, each alone and together. Overlap alone is merak: two sub-batches, and recomputation of whole layers.
ABLATION = {
    "fine-grained recomputation alone": "recomputation",
    "overlap alone": "merak",
    "both": "uniform",
    "both + planner": "oases",
}
_SCALE_HIDDEN, _SCALE_LAYERS = 8, 6
_HEAD_SIZE = 32
_PIECES = (2, 4)  # of them the fastest counts, as the original chooses by measurement
_RECOMPUTATION_ALONE = "oases --oases-sub-batches 1 --oases-ablate wgrad,filler,ends,interleave"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for every model.

    Args:
        nic_gbps: of the emulated servers, which have one device each.
        rounds: runs of each system, in alternation.
        iterations: of a run, warm-up included.
    """

    nic_gbps: float
    rounds: int
    iterations: int

    @property
    def launcher(self) -> Launcher:
        return Launcher(ranks=RANKS, nic_gbps=self.nic_gbps, threads_per_rank=1)

    @property
    def source(self) -> CostSource:
        """What the planners know of the cluster."""
        cluster = load_cluster("emulated")
        nic = replace(cluster.links.nic, bandwidth_gbps=self.nic_gbps)
        return source_of(replace(cluster, links=replace(cluster.links, nic=nic)))

    def flags(self, model: tuple[int, int]) -> list[str]:
        """Of pretrain_gpt.py, for one of the paper's models (hidden size, layers) scaled down, but for recomputation."""
        hidden_size, layers = scaled_down(model)
        changes = (
            f"--num-layers {layers} --hidden-size {hidden_size} --num-attention-heads {hidden_size // _HEAD_SIZE} "
            f"--tensor-model-parallel-size {RANKS}"
        )
        return shared_flags(
            recompute="none", iterations=self.iterations, overrides=changes.split(), transformer_engine=False
        )


def scaled_down(model: tuple[int, int]) -> tuple[int, int]:
    """(hidden size, layers) of what stands for a model of the paper."""
    return model[0] // _SCALE_HIDDEN, max(1, model[1] // _SCALE_LAYERS)


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """What is run for one model.

    Args:
        flags: that a run adds to those of the model, by the run's name.
        run_of: the run that stands for a system. Two systems may have the same: a plan may be Megatron's uniform degree.
        degrees: chosen for `alpa` and `oases`.
    """

    flags: Mapping[str, Sequence[str]]
    run_of: Mapping[str, Sequence[str]]
    degrees: Mapping[str, str]


def contenders(model: tuple[int, int], settings: Settings, parser: FlagParser, folder: Path) -> Contenders:
    """Plans are written to the folder."""
    full = RECOMPUTE["full"]
    decomposed = [f"wang --oases-pieces {pieces}" for pieces in _PIECES]
    flags = {name: [*full, *system_flags(name)] for name in ("megatron", *decomposed, "merak", "domino")}
    flags |= {
        "recomputation": [*full, *system_flags(_RECOMPUTATION_ALONE)],
        "uniform": [*full, *system_flags("oases")],
    }
    run_of = {name: [name] for name in flags} | {"wang": decomposed}
    degrees = {}
    for system, uniform in (("alpa", "megatron"), ("oases", "uniform")):
        planning = Planning(
            settings.flags(model),
            settings.source,
            parser,
            system=system,
            recompute="full",
            sub_batches=(2,),
            memory_bytes=memory_bytes(model, settings, parser),
        )
        plan = planning.plan_of(planning.best(world_size=RANKS)[0])
        degrees[system] = degrees_of(plan.layers)
        if all(degree == RANKS for layer in plan.layers for degree in (layer.attention.degree, layer.mlp.degree)):
            run_of[system] = [uniform]
            continue
        path = folder / f"{model[0]}x{model[1]}-{system}.json"
        write_plan(path, plan)
        flags[system], run_of[system] = ["--oases-plan", str(path)], [system]
    return Contenders(flags=flags, run_of=run_of, degrees=degrees)


def memory_bytes(model: tuple[int, int], settings: Settings, parser: FlagParser) -> int:
    """Of a device, for the planners: halfway between what Megatron needs at TP 1 and at TP 2, and enough for all at TP 2."""
    one = f"megatron --oases-degrees 1x{scaled_down(model)[1]}"
    predicted = predict(
        [*settings.flags(model), *RECOMPUTE["full"]],
        [one, "megatron", "oases"],  # of the others none needs more than the last
        settings.source,
        parser=parser,
        world_size=RANKS,
        record=False,
        announce=lambda line: None,
    )
    peak_bytes = {name: prediction.peak_bytes for name, prediction in predicted.items()}
    return max((peak_bytes[one] + peak_bytes["megatron"]) // 2, peak_bytes["oases"])


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """One model, measured.

    Args:
        model: (hidden size, layers) in the paper.
        settings: that it was measured with.
        degrees: see `Contenders`.
        run_of: see `Contenders`.
        iterations_ms: by run and round, without warm-up.
        compute_only_ms: an iteration of oases without its collectives.
        communication_only_ms: its collectives alone.
        loss_difference: the largest between any run and Megatron's first, over all iterations.
        seconds: that all of it took.
        about: when and where it was measured.
    """

    model: tuple[int, ...]
    settings: Settings
    degrees: dict[str, str]
    run_of: dict[str, tuple[str, ...]]
    iterations_ms: dict[str, tuple[tuple[float, ...], ...]]
    compute_only_ms: float
    communication_only_ms: float
    loss_difference: float
    seconds: float
    about: dict[str, str]

    def measured_ms(self, system: str) -> float:
        """An iteration: the median over the rounds."""
        return self._median_ms(self._fastest(system))

    def rounds_ms(self, system: str) -> list[float]:
        """Each round's median."""
        return [median(iterations_ms) for iterations_ms in self.iterations_ms[self._fastest(system)]]

    def speedup(self, system: str) -> float:
        """Over Megatron."""
        return self.measured_ms("megatron") / self.measured_ms(system)

    @property
    def best_baseline(self) -> str:
        """The fastest of the paper's."""
        return min(PAPER_BASELINES, key=self.measured_ms)

    @property
    def over_best_baseline(self) -> float:
        """Speed-up of oases over it."""
        return self.measured_ms(self.best_baseline) / self.measured_ms("oases")

    def efficiency(self, system: str) -> float:
        """How near it comes to what the work of oases takes at least: the slower half of that."""
        return Bound(
            measured_ms=self.measured_ms(system),
            compute_only_ms=self.compute_only_ms,
            communication_only_ms=self.communication_only_ms,
        ).efficiency

    def _fastest(self, system: str) -> str:
        """Of the runs that may stand for the system."""
        return min(self.run_of[system], key=self._median_ms)

    def _median_ms(self, run: str) -> float:
        return median(time_ms for iterations_ms in self.iterations_ms[run] for time_ms in iterations_ms)


def read_measured(path: Path) -> list[MeasuredModel]:
    """What `write_measured` has written; nothing where there is no file yet. Raises `UsageError`."""
    if not path.exists():
        return []
    return list(from_json(tuple[MeasuredModel, ...], read_json_object(path, version=VERSION).get("models"), str(path)))


def write_measured(path: Path, models: Sequence[MeasuredModel]) -> None:
    """Raises `UsageError`."""
    write_json_object(path, {"version": VERSION, "models": to_json(tuple(models))})


def runs_of(competing: Contenders, settings: Settings) -> int:
    """How many runs a model takes, at most."""
    halves = 2
    return len(competing.flags) * settings.rounds - (len(_PIECES) - 1) * (settings.rounds - 1) + halves


def measure(
    model: tuple[int, int],
    settings: Settings,
    competing: Contenders,
    *,
    on_start: Callable[[str], None],
    on_line: Callable[[str], None],
    on_end: Callable[[str, str], None],
) -> MeasuredModel:
    """Runs them in alternation, then each half of oases by itself. Raises `RunFailed`.

    Args:
        model: (hidden size, layers) in the paper.
        settings: the same for every model.
        competing: what is run.
        on_start: is given the name of each run before it.
        on_line: is given what it prints.
        on_end: is given its name and its result.
    """
    began = monotonic()
    runs: list[Run] = []

    def run(name: str, round_number: int, only: Half | None = None) -> None:
        what = f"{model[0]}x{model[1]}, round {round_number}, {run_name(name, only)}"
        on_start(what)
        runs.append(
            run_once(
                settings.launcher,
                system=name,
                round_number=round_number,
                flags=[*settings.flags(model), *competing.flags[name]],
                iterations=settings.iterations,
                on_line=on_line,
                only=only,
            )
        )
        on_end(what, f"{median_ms(runs[-1:]):.1f} ms an iteration")

    slower: set[str] = set()
    for round_number, name in order_of_runs(list(competing.flags), settings.rounds):
        if round_number > 1 and not slower:
            alternatives = competing.run_of["wang"]
            fastest = min(alternatives, key=lambda name: median_ms([each for each in runs if each.system == name]))
            slower = set(alternatives) - {fastest}
        if name not in slower:
            run(name, round_number)
    oases = competing.run_of["oases"][0]
    for only in ("compute", "communication"):
        run(oases, 1, only)
    whole = {name: [each for each in runs if each.system == name and each.only is None] for name in competing.flags}
    reference = whole["megatron"][0].losses
    return MeasuredModel(
        model=model,
        settings=settings,
        degrees=dict(competing.degrees),
        run_of={system: tuple(names) for system, names in competing.run_of.items()},
        iterations_ms={
            name: tuple(each.iterations_ms[WARM_UP_ITERATIONS:] for each in own) for name, own in whole.items()
        },
        compute_only_ms=median_ms(each for each in runs if each.only == "compute"),
        communication_only_ms=median_ms(each for each in runs if each.only == "communication"),
        loss_difference=max(
            abs(loss - expected)
            for own in whole.values()
            for each in own
            for loss, expected in zip(each.losses, reference, strict=True)
        ),
        seconds=monotonic() - began,
        about={name: str(value) for name, value in describe_machine(REPOSITORY).items()},
    )
