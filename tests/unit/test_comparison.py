import io

import pytest
from rich.console import Console

from megatron.oases.errors import UsageError
from megatron.oases.report.comparison import Comparison, order_of_runs
from megatron.oases.report.runs import Half, Run
from megatron.oases.report.systems import SYSTEMS, shared_flags, system_flags, world_size
from megatron.oases.report.tables import bound_table, comparison_table


def run(
    system: str,
    round_number: int,
    iterations_ms: list[float],
    losses: list[float] | None = None,
    only: Half | None = None,
) -> Run:
    return Run(
        system=system,
        round_number=round_number,
        iterations_ms=tuple(iterations_ms),
        losses=tuple(losses or [7.0, 6.0, 5.0, 4.0, 3.0][: len(iterations_ms)]) if only is None else (),
        tokens_per_iteration=1024,
        only=only,
    )


def runs() -> list[Run]:
    return [
        run("a", 1, [9000, 9000, 100, 120, 140]),
        run("b", 1, [9000, 9000, 50, 50, 60], [7.0, 6.0, 5.0, 4.25, 3.0]),
        run("b", 2, [9000, 9000, 80, 80, 80], [7.0, 6.0, 5.5, 4.0, 3.0]),
        run("a", 2, [9000, 9000, 160, 180, 200]),
    ]


def comparison() -> Comparison:
    return Comparison.of_runs(["a", "b"], runs())


def bounded_comparison(*, slowest_ms: float = 90) -> Comparison:
    """System b takes 70 ms, a 150."""
    halves = [
        run("a", 1, [9000, 9000, slowest_ms], only="compute"),
        run("a", 1, [9000, 9000, 60], only="communication"),
        run("b", 1, [9000, 9000, 40, 40, 50], only="compute"),
        run("b", 2, [9000, 9000, 50, 50, 60], only="compute"),
        run("b", 1, [9000, 9000, 63], only="communication"),
        run("b", 2, [9000, 9000, 63], only="communication"),
    ]
    return Comparison.of_runs(["a", "b"], halves[:3] + runs() + halves[3:])


def test_the_median_is_over_all_rounds_without_each_rounds_warm_up():
    a, b = comparison().systems
    assert a.iteration_ms == 150
    assert a.round_medians_ms == [120, 180]
    assert b.iteration_ms == 70


def test_speedups_are_over_the_first_system():
    result = comparison()
    assert [result.speedup(system) for system in result.systems] == [1.0, 150 / 70]


def test_tokens_per_s():
    assert comparison().systems[0].tokens_per_s == pytest.approx(1024 / 0.150)


def test_the_loss_difference_is_the_largest_of_any_round_and_iteration():
    result = comparison()
    assert [result.loss_difference(system) for system in result.systems] == [0.0, 0.5]
    assert result.max_loss_difference == 0.5


def test_a_first_system_that_does_not_repeat_itself_shows():
    result = Comparison.of_runs(["a"], [run("a", 1, [1] * 3), run("a", 2, [1] * 3, [7.0, 6.0, 5.125])])
    assert result.max_loss_difference == 0.125


def test_json():
    result = comparison().to_json(command="the command", machine={"cores": 2})
    assert result == {
        "systems": {
            "a": {
                "iteration_ms": 150,
                "iterations_ms": [[9000, 9000, 100, 120, 140], [9000, 9000, 160, 180, 200]],
                "tokens_per_s": pytest.approx(1024 / 0.150),
                "losses": [7.0, 6.0, 5.0, 4.0, 3.0],
            },
            "b": {
                "iteration_ms": 70,
                "iterations_ms": [[9000, 9000, 50, 50, 60], [9000, 9000, 80, 80, 80]],
                "tokens_per_s": pytest.approx(1024 / 0.070),
                "losses": [7.0, 6.0, 5.0, 4.25, 3.0],
            },
        },
        "speedup": {"a": 1.0, "b": 150 / 70},
        "max_loss_difference": 0.5,
        "command": "the command",
        "machine": {"cores": 2},
    }


def test_the_table_fits_eighty_columns_and_has_every_number():
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_table(comparison(), title="two systems"))
    lines = console.file.getvalue().splitlines()
    (row,) = [line for line in lines if line.startswith("│ b ")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["b", "70.0", "50-80", "14629", "2.143", "5.0e-01"]
    caption = " ".join(console.file.getvalue().split("╯")[-1].split("┘")[-1].split())
    assert caption.startswith("Medians over 2 rounds of 5 iterations, without the first 2 of each; losses against a's")


def test_one_round_has_no_range():
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_table(Comparison.of_runs(["a"], runs()[:1]), title="one round"))
    (row,) = [line for line in console.file.getvalue().splitlines() if line.startswith("│ a ")]
    assert [cell.strip() for cell in row.strip("│").split("│")][2] == "–"
    assert "over 1 round of 5 iterations" in console.file.getvalue()


def test_runs_of_one_half_change_no_other_number():
    plain, bounded = (c.to_json(command="", machine={}) for c in (comparison(), bounded_comparison()))
    added = {"compute_only_ms", "communication_only_ms", "bound_ms", "efficiency", "communication_hidden"}
    for name, system in bounded["systems"].items():
        assert system.keys() - plain["systems"][name].keys() == added
        bounded["systems"][name] = {key: value for key, value in system.items() if key not in added}
    assert bounded == plain


def test_the_bound_of_each_system_is_from_its_own_halves():
    system = bounded_comparison().to_json(command="", machine={})["systems"]["b"]
    assert system["compute_only_ms"] == 50
    assert system["communication_only_ms"] == system["bound_ms"] == 63
    assert system["efficiency"] == pytest.approx(63 / 70)
    assert system["communication_hidden"] == pytest.approx(1 - 20 / 63)


def test_the_table_of_bounds_fits_eighty_columns():
    console = Console(width=80, file=io.StringIO())
    console.print(bound_table(bounded_comparison(slowest_ms=54321.9)))
    assert "…" not in console.file.getvalue()
    lines = console.file.getvalue().splitlines()
    (row,) = [line for line in lines if line.startswith("│ b ")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["b", "70", "50", "63", "63", "0.900", "68%"]


def test_rounds_alternate_forwards_and_backwards():
    assert order_of_runs(["a", "b", "c"], 2) == [(1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "b"), (2, "a")]


def test_the_users_flags_come_last():
    flags = shared_flags(recompute="none", iterations=7, overrides=["--num-layers", "2"])
    assert flags[-2:] == ["--num-layers", "2"]
    assert flags[flags.index("--train-iters") + 1] == "7"
    assert not any("recompute" in flag for flag in flags)
    assert "--recompute-granularity" in shared_flags(recompute="full", iterations=7, overrides=[])


@pytest.mark.parametrize(
    "flag", ["--train-iters", "--train-iters=5", "--oases-report", "--oases-report=x", "--oases-only=compute"]
)
def test_flags_that_compare_needs_for_itself_are_refused(flag):
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
        shared_flags(recompute="full", iterations=7, overrides=[flag, "5"])


@pytest.mark.parametrize(
    "overrides, ranks",
    [
        ([], 2),
        (["--tensor-model-parallel-size", "4"], 4),
        (["--tensor-model-parallel-size=1"], 1),
        (["--pipeline-model-parallel-size", "2"], 4),
    ],
)
def test_ranks_follow_the_flags(overrides, ranks):
    assert world_size(shared_flags(recompute="full", iterations=7, overrides=overrides)) == ranks


@pytest.mark.parametrize("value", ["two", "0", "-2"])
def test_an_impossible_number_of_ranks_names_the_flag(value):
    with pytest.raises(UsageError, match="--tensor-model-parallel-size"):
        world_size(["--tensor-model-parallel-size", value])


def test_the_baseline_has_no_flag_of_ours_but_the_faster_attention():
    assert SYSTEMS["megatron"] == ("--oases-schedule", "vanilla"), "which is what no flag means"
    shared = shared_flags(recompute="full", iterations=7, overrides=[])
    ours = [flag for flag in shared if "oases" in flag]
    assert ours == ["--oases-core-attention"]
    assert shared[shared.index("--oases-core-attention") + 1] == "sdpa"


def test_systems_with_flags_of_their_own():
    assert system_flags("oases") == SYSTEMS["oases"]
    assert system_flags("oases --oases-ablate gemm,filler") == (*SYSTEMS["oases"], "--oases-ablate", "gemm,filler")


@pytest.mark.parametrize(
    "system, message",
    [
        ("merlin", "--systems merlin: there are megatron, wang, merak, domino, oases"),
        ("", "--systems : there are"),
        ("oases --train-iters=3", "--train-iters in --systems 'oases --train-iters=3': compare sets it itself"),
    ],
)
def test_what_is_no_system(system, message):
    with pytest.raises(UsageError, match=message):
        system_flags(system)
