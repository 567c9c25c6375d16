"""A GPT small enough to be pretrained within a test, and what it is trained on."""

import json
from pathlib import Path

VOCABULARY = 256
SMALL = [
    "--num-layers", "2",
    "--hidden-size", "64",
    "--num-attention-heads", "4",
    "--seq-length", "32",
    "--max-position-embeddings", "32",
    "--micro-batch-size", "2",
    "--global-batch-size", "4",
    "--lr", "1e-3",
    "--log-interval", "1",
    "--eval-iters", "1",
    "--num-workers", "0",
]  # fmt: skip
MOCK_DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1)]

_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix jugs of black quartz".split()


def _lines(count: int) -> list[str]:
    """Text with something to learn in it: each word is followed by one of three others."""
    state, lines = 1, []
    for _ in range(count):
        words = ["the"]
        while len(words) < 12:
            state = (state * 1103515245 + 12345) % 2**31
            words.append(_WORDS[(_WORDS.index(words[-1]) * 5 + (state >> 16) % 3) % len(_WORDS)])
        lines.append(" ".join(words))
    return lines


def write_sentencepiece_corpus(folder: Path) -> list[str]:
    """Trains a SentencePiece tokenizer on text, writes the text as Megatron reads it; returns the flags for both."""
    import numpy
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    lines = _lines(400)
    (folder / "corpus.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = str(folder / "tokenizer.model")
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=model)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=numpy.uint16)
    for line in lines:
        tokens = [*tokenizer.encode(line), tokenizer.eos_id()]
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(folder / "corpus.idx"))
    return [
        "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model,
        "--data-path", str(folder / "corpus"), "--split", "80,10,10", "--data-cache-path", str(folder / "cache"),
    ]  # fmt: skip


def write_gpt2_vocabulary(folder: Path) -> list[str]:
    """Writes a byte-pair vocabulary of single letters, and returns the flags for it with mock data."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = {token: number for number, token in enumerate([*letters, "th", "the", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    return [
        "--mock-data", "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt"),
    ]  # fmt: skip


def losses(report: Path) -> dict[int, float]:
    """The losses of an --oases-report file by iteration."""
    return {entry["iteration"]: entry["loss"] for entry in json.loads(report.read_text())["iterations"]}
