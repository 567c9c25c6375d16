"""Defaults that work where Megatron's own do not, and refusals of what the user asked for in vain."""

import pytest

from megatron.oases.arguments import given_flags
from megatron.oases.available import Available, choose_defaults, refuse_impossible
from megatron.oases.errors import UsageError
from tests.unit.megatron_parser import new_parser

CPU, BARE_GPU = Available.torch_alone("cpu"), Available.torch_alone("cuda")
FULL_GPU = Available(cuda=True, transformer_engine=True, apex=True, fused_wgrad=True, fused_softmax=True)


@pytest.fixture(scope="module")
def parser():
    return new_parser()


def _choose(parser, argv=(), available=CPU, schedule="vanilla", split="batch", core_attention="local"):
    saved = dict(parser._defaults), [(action, action.default) for action in parser._actions]
    try:
        given = given_flags(parser, argv)
        refuse_impossible(given, available)
        flags = choose_defaults(
            parser, given, available, schedule=schedule, split=split, core_attention=core_attention
        )
        return flags, parser.parse_args(argv)
    finally:
        parser._defaults = saved[0]
        for action, default in saved[1]:
            action.default = default


def test_on_the_cpu(parser):
    flags, args = _choose(parser)
    assert args.transformer_impl == "local"
    assert args.distributed_backend == "gloo"
    assert args.no_persist_layer_norm
    for name in (
        "gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion", "bias_gelu_fusion",
        "bias_swiglu_fusion", "bias_dropout_fusion", "create_attention_mask_in_dataloader",
    ):  # fmt: skip
        assert getattr(args, name) is False, name
    # What is said can be given as flags, and means the same.
    spoken = parser.parse_args(" ".join(flags).split())
    assert {**vars(spoken), "enable_one_logger": None} == {**vars(args), "enable_one_logger": None}


def test_a_fully_equipped_gpu_keeps_megatrons_defaults(parser):
    flags, args = _choose(parser, available=FULL_GPU)
    assert flags == []
    plain = parser.parse_args([])
    assert {**vars(plain), "enable_one_logger": None} == {**vars(args), "enable_one_logger": None}


def test_a_gpu_with_torch_alone(parser):
    flags, args = _choose(parser, available=BARE_GPU)
    assert args.transformer_impl == "local"
    assert args.distributed_backend == "nccl"
    assert args.bias_gelu_fusion
    assert set(flags) == {
        "--transformer-impl local", "--no-persist-layer-norm", "--no-rope-fusion", "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
    }  # fmt: skip


def test_the_schedule_runs_megatrons_own_layers(parser):
    _, args = _choose(parser, available=FULL_GPU, schedule="oases")
    assert args.transformer_impl == "local"


@pytest.mark.parametrize(
    ("available", "schedule", "split", "argv", "expected"),
    [
        (FULL_GPU, "oases", "batch", "", "te"),
        (FULL_GPU, "oases", "batch", "--oases-core-attention sdpa", "sdpa"),
        (FULL_GPU, "oases", "sequence", "", "local"),
        (FULL_GPU, "vanilla", "batch", "", "local"),
        (BARE_GPU, "oases", "batch", "", "local"),
    ],
)
def test_the_schedule_takes_transformer_engines_core_attention(parser, available, schedule, split, argv, expected):
    _, args = _choose(parser, argv.split(), available, schedule=schedule, split=split)
    assert args.oases_core_attention == expected


def test_what_the_user_wrote_stays_and_is_not_mentioned(parser):
    flags, args = _choose(parser, ["--distributed-backend", "gloo", "--no-rope-fusion"], available=BARE_GPU)
    assert args.distributed_backend == "gloo"
    assert "--no-rope-fusion" not in flags


@pytest.mark.parametrize(
    ("available", "schedule", "argv", "has_mask"),
    [
        (FULL_GPU, "oases", "", False),
        (FULL_GPU, "oases", "--oases-core-attention local", True),
        (FULL_GPU, "vanilla", "", True),
        (BARE_GPU, "vanilla", "--oases-core-attention sdpa", False),
        (BARE_GPU, "oases", "--oases-core-attention sdpa --reset-attention-mask", True),
    ],
)
def test_no_mask_is_made_for_attention_that_knows_it_is_causal(parser, available, schedule, argv, has_mask):
    chosen = "sdpa" if "sdpa" in argv else "local"
    _, args = _choose(parser, argv.split(), available, schedule=schedule, core_attention=chosen)
    assert args.create_attention_mask_in_dataloader == has_mask


def test_masks_that_the_data_brings_are_kept(parser):
    _, args = _choose(parser, ["--reset-attention-mask"])
    assert args.create_attention_mask_in_dataloader


@pytest.mark.parametrize(
    ("argv", "available", "message"),
    [
        ("--transformer-impl transformer_engine", BARE_GPU, "--transformer-impl transformer_engine needs Transformer"),
        ("--transformer-impl transformer_engine", CPU, "--transformer-impl transformer_engine needs Transformer"),
        ("--distributed-backend nccl", CPU, "--distributed-backend nccl needs a GPU"),
        ("--attention-backend flash", BARE_GPU, "--attention-backend flash needs Transformer Engine"),
        ("--use-flash-attn", CPU, "--use-flash-attn needs Transformer Engine"),
        ("--oases-core-attention te", BARE_GPU, "--oases-core-attention te needs Transformer Engine"),
        ("--fp8-format hybrid", BARE_GPU, "--fp8-format needs Transformer Engine"),
        ("--apply-layernorm-1p", CPU, "--apply-layernorm-1p needs apex, or"),
        ("--cuda-graph-impl local", CPU, "--cuda-graph-impl needs a GPU"),
        ("--use-megatron-fsdp", CPU, "--use-megatron-fsdp needs a GPU"),
        ("--optimizer-cpu-offload", CPU, "--optimizer-cpu-offload needs a GPU"),
    ],
)
def test_in_vain(parser, argv, available, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        _choose(parser, argv.split(), available)


@pytest.mark.parametrize(
    "argv", ["--cuda-graph-impl none", "--sequence-parallel --tensor-model-parallel-size 2", "--attention-backend auto", "--attention-backend unfused"]
)
def test_not_in_vain(parser, argv):
    _choose(parser, argv.split(), CPU)


def test_on_another_machine_with_a_gpu_anything_may_be_there():
    assert BARE_GPU.possible == FULL_GPU.possible == FULL_GPU
    assert CPU.possible == CPU
