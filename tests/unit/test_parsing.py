from argparse import Namespace

import pytest

from megatron.oases.errors import UsageError
from megatron.oases.parsing import _check_evaluation, _mend_help, megatron_refusals
from tests.unit.megatron_parser import new_parser


def _refusal(of: Exception) -> str:
    with pytest.raises(UsageError) as refusal, megatron_refusals():
        raise of
    return str(refusal.value)


def test_the_first_line_of_what_megatron_says_and_where():
    message = _refusal(AssertionError("the layers\n  do not fit"))
    assert message.startswith("Megatron refuses these flags: the layers (")
    assert message.endswith(f"({__file__}:{_refusal.__code__.co_firstlineno + 2})")


def test_an_assertion_without_a_message_shows_its_line():
    assert "Megatron refuses these flags: raise of (" in _refusal(AssertionError())


@pytest.mark.parametrize("error", [ValueError, RuntimeError, OSError, ImportError])
def test_each_way_to_refuse(error):
    assert "refuses these flags: no" in _refusal(error("no"))


def test_our_own_refusals_pass_and_faults_stay_faults():
    assert _refusal(UsageError("ours")) == "ours"
    with pytest.raises(TypeError), megatron_refusals():
        raise TypeError("a fault")


def test_an_evaluation_interval_is_needed():
    given = {"eval_interval": None, "yaml_cfg": None, "skip_train": False, "full_validation": False}
    with pytest.raises(UsageError, match="--eval-interval is missing"):
        _check_evaluation(Namespace(**given))
    for changed in ({"eval_interval": 10}, {"skip_train": True}, {"full_validation": True}, {"yaml_cfg": "a.yaml"}):
        _check_evaluation(Namespace(**{**given, **changed}))


def test_bug_help_failed_on_a_percent_sign(capsys):
    parser = new_parser()
    with pytest.raises(ValueError):
        parser.format_help()
    _mend_help(parser)
    help_text = parser.format_help()
    for flag in ("--oases-device", "--oases-schedule", "--oases-sub-batches", "--oases-split", "--oases-report"):
        assert flag in help_text
