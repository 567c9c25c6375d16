#!/usr/bin/env python
"""Trains a small SentencePiece tokenizer on JSON lines, for Megatron's SentencePieceTokenizer.

Nothing of a text is lost: line breaks and runs of spaces are kept, and characters outside the vocabulary become bytes.
It has an end-of-document token (`</s>`, which Megatron appends with --append-eod) and one for padding.
"""

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.oases.command_line import OneLineParser  # noqa: E402
from megatron.oases.data.encode import BadLine, parse_record, text_under  # noqa: E402
from megatron.oases.data.lines import read_pieces  # noqa: E402
from megatron.oases.errors import UsageError, exit_on_usage_error  # noqa: E402

_LONGEST_LINE_BYTES = 1 << 16
# Part of the result: another number of threads may break ties between equally frequent pairs in another way.
_THREADS = 2


def text_lines(path: str, key: str) -> Iterator[str]:
    """Lines of the texts, so that no piece of the vocabulary spans a line break."""
    for piece in read_pieces([path]):
        for number, line in enumerate(piece.lines, start=piece.first_number):
            try:
                text = text_under(parse_record(line), key)
            except BadLine as bad:
                raise UsageError(f"{path} line {number}: {bad.detail}") from bad
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(prog="train_tokenizer.py", description=__doc__)
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON lines; .gz is decompressed")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the key that holds the text (default: text)")
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="N",
                        help="tokens in the vocabulary, 256 bytes and 4 special ones included (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .model file to write")
    args = parser.parse_args(argv)

    if args.vocab_size < 1:
        raise UsageError(f"--vocab-size {args.vocab_size}: at least 1")
    # All at once: SentencePiece keeps them in memory anyway, and would wrap a bad line's error in one of its own.
    lines = list(text_lines(args.input, args.json_key))
    try:
        model = train(iter(lines), args.vocab_size)
    except RuntimeError as error:  # SentencePiece's only exception; its message starts with a place in its source
        reason = str(error).rpartition("] ")[2].strip() or "too little text"
        raise UsageError(f"--vocab-size {args.vocab_size} on {args.input}: {reason}") from error
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_bytes(model)
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror}") from error
    print(f"wrote {args.output}: {args.vocab_size} tokens")


if __name__ == "__main__":
    with exit_on_usage_error():
        main()
