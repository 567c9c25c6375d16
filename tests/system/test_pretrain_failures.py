"""Runs that end early: by a user's mistake, or because a rank died. Neither hangs, and each tells why."""

import time

import pytest

from tests.launch import running, torchrun, torchrun_command
from tests.system.small_gpt import MOCK_DATA, SMALL, losses

PARALLEL = ["--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            [*MOCK_DATA, "--oases-schedule", "oases", "--oases-sub-batches", "4"],
            "error: --micro-batch-size 2 is less than --oases-sub-batches 4",
        ),
        (
            [*MOCK_DATA, "--oases-schedule", "oases", "--oases-degrees", "2,1"],
            "error: --oases-degrees 2,1: layer 2 of 2, attention: degree 1 makes 2 / 1 = 2 sub-groups",
        ),
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--data-path", "corpus.bin"],
            "error: --data-path corpus.bin: give the prefix, without .bin: corpus",
        ),
    ],
)
def test_a_mistake_is_one_line(flags, line):
    finished = torchrun(["pretrain_gpt.py", *SMALL, *PARALLEL, "--train-iters", "5", "--eval-interval", "5", *flags])
    assert finished.code != 0
    assert len(finished.lines(line)) == 1, finished.tail
    assert len(finished.lines("error:")) == 1, finished.tail
    assert "iteration        1/" not in finished.output
    # The launcher shows a traceback of its own; the ranks show none.
    assert "pretrain_gpt.py\", line" not in finished.output


def test_a_killed_rank_ends_the_job_which_can_be_resumed(tmp_path):
    saved, report = tmp_path / "saved", tmp_path / "report.json"
    command = [
        "pretrain_gpt.py", *SMALL, *PARALLEL, *MOCK_DATA, "--eval-interval", "1000000",
        "--train-iters", "100000", "--save", str(saved), "--save-interval", "5", "--oases-report", str(report),
    ]  # fmt: skip
    with running(torchrun_command(command, 2)) as job:
        latest = saved / "latest_checkpointed_iteration.txt"
        started = time.monotonic()
        while not latest.exists() and time.monotonic() - started < 180 and job.process.poll() is None:
            time.sleep(0.1)
        assert latest.exists(), job.output
        ranks = job.ranks("pretrain_gpt.py")
        assert len(ranks) == 2
        ranks[1].kill()
        finished = job.wait(60)
        assert finished.code != 0
        assert not any(rank.is_running() for rank in ranks)
    assert losses(report)[1] > 0

    iteration = int(latest.read_text())
    finished = torchrun([*command, "--load", str(saved), "--exit-interval", str(iteration + 2)])
    assert finished.code == 0, finished.tail
    assert list(losses(report)) == [iteration + 1, iteration + 2]
