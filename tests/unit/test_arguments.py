from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

from megatron.oases.arguments import OasesConfig, add_oases_arguments, choose_device, given_flags
from megatron.oases.errors import UsageError
from megatron.oases.schedule import Idea


def _config(*argv: str) -> OasesConfig:
    return OasesConfig.from_args(add_oases_arguments(ArgumentParser()).parse_args(argv), device="cpu")


def test_defaults_are_vanilla():
    assert _config() == OasesConfig(device="cpu", schedule="vanilla", sub_batches=1, report=None)


def test_the_schedule_splits_in_two_by_default():
    assert _config("--oases-schedule", "oases").sub_batches == 2
    assert _config("--oases-schedule", "oases", "--oases-sub-batches", "4").sub_batches == 4


def test_a_flag_without_effect_is_refused():
    with pytest.raises(UsageError, match="--oases-sub-batches 2 has no effect with --oases-schedule vanilla"):
        _config("--oases-sub-batches", "2")


def test_what_to_cut():
    assert _config("--oases-schedule", "oases").split == "batch"
    assert _config("--oases-schedule", "oases", "--oases-split", "sequence").split == "sequence"
    with pytest.raises(UsageError, match="--oases-split sequence has no effect with --oases-schedule vanilla"):
        _config("--oases-split", "sequence")


def test_ideas_to_leave_out():
    config = _config("--oases-schedule", "oases", "--oases-ablate", "filler,ends")
    assert config.ablate == {Idea.FILLER, Idea.ENDS}
    with pytest.raises(UsageError, match="--oases-ablate filler,fun: 'fun' is none of gemm, wgrad, filler, ends, last, inter"):
        _config("--oases-schedule", "oases", "--oases-ablate", "filler,fun")
    with pytest.raises(UsageError, match="--oases-ablate ends has no effect with --oases-schedule vanilla"):
        _config("--oases-ablate", "ends")


@pytest.mark.parametrize(
    ("schedule", "sub_batches", "pieces"),
    [("vanilla", 1, 1), ("wang", 1, 4), ("merak", 2, 1), ("domino", 2, 1), ("oases", 2, 1)],
)
def test_what_a_system_cuts(schedule, sub_batches, pieces):
    config = _config("--oases-schedule", schedule)
    assert (config.sub_batches, config.pieces) == (sub_batches, pieces)
    assert config.is_scheduled == (schedule != "vanilla")


@pytest.mark.parametrize(
    ("schedule", "flag", "value", "readers"),
    [
        ("wang", "--oases-sub-batches", "2", "merak or domino or oases"),
        ("oases", "--oases-pieces", "2", "wang"),
        ("merak", "--oases-split", "sequence", "oases"),
        ("domino", "--oases-ablate", "ends", "oases"),
    ],
)
def test_a_flag_of_another_system_is_refused(schedule, flag, value, readers):
    with pytest.raises(UsageError, match=f"{flag} {value} has no effect with --oases-schedule {schedule}: .* {readers}$"):
        _config("--oases-schedule", schedule, flag, value)


def test_at_least_one_piece():
    assert _config("--oases-schedule", "wang", "--oases-pieces", "8").pieces == 8
    with pytest.raises(UsageError, match="--oases-pieces 0 must be at least 1"):
        _config("--oases-schedule", "wang", "--oases-pieces", "0")


def test_at_least_one_sub_batch():
    with pytest.raises(UsageError, match="--oases-sub-batches 0 must be at least 1"):
        _config("--oases-schedule", "oases", "--oases-sub-batches", "0")


def test_report_needs_its_folder(tmp_path):
    assert _config("--oases-report", str(tmp_path / "a.json")).report == Path(tmp_path / "a.json")
    assert _config("--oases-report", "here.json").report == Path("here.json")
    with pytest.raises(UsageError, match="--oases-report .*/b/a.json: there is no folder .*/b"):
        _config("--oases-report", str(tmp_path / "b" / "a.json"))


def test_one_half_alone_needs_a_report(tmp_path):
    config = _config("--oases-only", "compute", "--oases-report", str(tmp_path / "a.json"))
    assert config.only == "compute"
    with pytest.raises(UsageError, match="--oases-only communication .* add --oases-report FILE"):
        _config("--oases-only", "communication")


@pytest.mark.parametrize(
    ("argv", "gpu", "device"),
    [
        ([], True, "cuda"),
        ([], False, "cpu"),
        (["--oases-device", "auto", "--lr", "1"], False, "cpu"),
        (["--oases-device=cpu"], True, "cpu"),
        (["--oases-device", "cuda"], True, "cuda"),
    ],
)
def test_choose_device(monkeypatch, argv, gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert choose_device(argv) == device


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--oases-device cuda: torch finds no GPU"):
        choose_device(["--oases-device", "cuda"])
    with pytest.raises(UsageError, match="--oases-device: invalid choice: 'tpu'"):
        choose_device(["--oases-device", "tpu"])


def test_given_flags_are_those_on_the_command_line():
    parser = ArgumentParser()
    parser.add_argument("--a", type=int, default=1)
    parser.add_argument("--b", type=int, default=2)
    parser.add_argument("--no-c", action="store_false", dest="c")
    assert given_flags(parser, ["--a", "1", "--unknown"]) == Namespace(a=1)
    assert given_flags(parser, ["--no-c"]) == Namespace(c=False)
    # The parser is as before.
    assert parser.parse_args([]) == Namespace(a=1, b=2, c=True)
