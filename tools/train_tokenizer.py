#!/usr/bin/env python
"""Trains a small SentencePiece tokenizer on JSON lines, for Megatron's SentencePieceTokenizer.

Nothing of a text is lost: line breaks and runs of spaces are kept, and characters outside the vocabulary become bytes.
It has an end-of-document token (`</s>`, which Megatron appends with --append-eod) and one for padding.
"""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.environment import require  # noqa: E402

require("numpy", "sentencepiece")

import sentencepiece  # noqa: E402

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.data.encode import BadLine, parse_record, text_under  # noqa: E402
from megatron.oases.data.lines import find_inputs, read_pieces  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402

_LONGEST_LINE_BYTES = 1 << 16
# Part of the result: another number of threads may break ties between equally frequent pairs in another way.
_THREADS = 2


def text_lines(paths: Sequence[str], key: str) -> Iterator[str]:
    """Lines of the texts, so that no piece of the vocabulary spans a line break."""
    for piece in read_pieces(paths):
        for number, line in enumerate(piece.lines, start=piece.first_number):
            try:
                text = text_under(parse_record(line), key)
            except BadLine as bad:
                raise UsageError(f"{piece.path} line {number}: {bad.detail}") from bad
            yield from filter(None, text.split("\n"))


def train(lines: Iterator[str], vocab_size: int) -> bytes:
    """The tokenizer model as SentencePiece stores it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",  # counts only, so the same text gives the same model; and it trains in seconds
        vocab_size=vocab_size,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        character_coverage=0.9995,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        max_sentence_length=_LONGEST_LINE_BYTES,
        num_threads=_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def _reason(message: str, line_count: int) -> str:
    """What SentencePiece's message means here; some of its advice is about options that this tool does not have."""
    if line_count == 0:
        return "there is no text in it"
    if largest := re.search(r"too high .*<= (\d+)", message):
        return f"too large; this text gives at most {largest[1]} tokens"
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"too small; the bytes, the special tokens and this text's characters alone are {smallest[1]} tokens"
    return message.rpartition("] ")[2].strip() or message


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(prog="train_tokenizer.py", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="JSON-lines files, or patterns in quotes; .gz is decompressed")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the key that holds the text (default: text)")
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="N",
                        help="tokens in the vocabulary, 256 bytes and 4 special ones included (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .model file to write")
    args = parser.parse_args(argv)

    if args.vocab_size < 1:
        raise UsageError(f"--vocab-size {args.vocab_size}: at least 1")
    # All at once: SentencePiece keeps them in memory anyway, and would wrap a bad line's error in one of its own.
    lines = list(text_lines(find_inputs(args.input), args.json_key))
    try:
        model = train(iter(lines), args.vocab_size)
    except RuntimeError as error:  # SentencePiece's only exception; its message starts with a place in its source
        raise UsageError(
            f"--vocab-size {args.vocab_size} on {' '.join(args.input)}: {_reason(str(error), len(lines))}") from error
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_bytes(model)
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror}") from error
    print(f"wrote {args.output}: {args.vocab_size} tokens")


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
