#!/usr/bin/env python
"""Tokenizes JSON lines into the .bin/.idx pairs that Megatron trains on. Flags as in Megatron-LM; see docs/data.md."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("numpy", "torch", "megatron.core")

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402
from megatron.oases.quiet import silence  # noqa: E402

# Fields of Megatron's tokenizer configuration that mean nothing before there is a model.
_MODEL_FIELDS = ["padded_vocab_size", "pad_vocab_size", "vocab_extra_ids"]


def make_parser() -> OneLineParser:
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = OneLineParser(prog="preprocess_data.py", description=__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--input", nargs="+", required=True, metavar="FILE",
                      help="JSON-lines files, or patterns in quotes; .gz is decompressed")
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                      help="keys that hold text; each is written to a pair of its own (default: text)")
    data.add_argument("--output-prefix", required=True, metavar="PATH",
                      help="writes PATH_KEY_document.bin and .idx, over older ones")
    data.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    data.add_argument("--skip-bad-lines", action="store_true",
                      help="leave out lines that hold no document and report how many (default: stop at the first)")
    run = parser.add_argument_group("run")
    run.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                     help="processes that tokenize (default: one a CPU, here %(default)s)")
    run.add_argument("--log-interval", type=int, default=1000, metavar="N",
                     help="documents between two progress lines (default: %(default)s)")
    run.add_argument("--partitions", type=int, help="not needed: accepted for Megatron's command lines")
    run.add_argument("--keep-sequential-samples", action="store_true",
                     help="always so: accepted for Megatron's command lines")
    ArgumentGroupFactory(TokenizerConfig, exclude=_MODEL_FIELDS).build_group(parser, "tokenizer")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    silence()
    # The tokenizers library would warn in every forked worker that it switches its own threads off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without a network its retries fill a screen before the one line that counts.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from megatron.oases.data.preprocess import PreprocessConfig, preprocess

    args = make_parser().parse_args(argv)
    args.pad_vocab_size = False
    if args.partitions is not None:
        print("--partitions is ignored: one process writes, in the order of the input", flush=True)
    config = PreprocessConfig(
        inputs=tuple(args.input),
        json_keys=tuple(args.json_keys),
        output_prefix=args.output_prefix,
        append_eod=args.append_eod,
        skip_bad_lines=args.skip_bad_lines,
        workers=args.workers,
        log_interval=args.log_interval,
    )
    preprocess(config, args, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    # Ends through the clean-up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with exit_on_usage_error():
        try:
            main()
        except KeyboardInterrupt:
            raise UsageError("interrupted; nothing was written") from None
