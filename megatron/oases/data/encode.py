"""From one line of JSON to token ids, and what can be wrong with a line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.oases.data.lines import Piece


class BadLine(ValueError):
    """A line that holds no document. `kind` is what is counted, `detail` what is told about this one."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Skipped:
    """Where a bad line was."""

    path: str
    number: int
    kind: str
    detail: str


@dataclass
class EncodedPiece:
    """The documents of one piece: for each key their ids end to end, and the length of each."""

    ids: dict[str, np.ndarray]
    lengths: dict[str, list[int]]
    skipped: list[Skipped] = field(default_factory=list)
    line_count: int = 0
    size_bytes: int = 0


class Encoder:
    """Turns lines into token ids of type `dtype`."""

    def __init__(self, tokenizer, keys: Sequence[str], dtype: type[np.integer], end_id: int | None):
        """`end_id` is appended to every document, where it is not None."""
        self._tokenizer = tokenizer
        self._keys = tuple(keys)
        self._dtype = dtype
        self._end_id = end_id
        # What fits the vocabulary fits the file's type as well, which is chosen by the vocabulary.
        self._id_limit = tokenizer.vocab_size

    def encode(self, piece: Piece) -> EncodedPiece:
        """Documents keep the order of their lines; a bad line is left out and listed."""
        documents: dict[str, list[np.ndarray]] = {key: [] for key in self._keys}
        skipped = []
        for number, line in enumerate(piece.lines, start=piece.first_number):
            try:
                encoded = self.encode_line(line)
            except BadLine as bad:
                skipped.append(Skipped(piece.path, number, bad.kind, bad.detail))
                continue
            for key, ids in encoded.items():
                documents[key].append(ids)
        return EncodedPiece(
            ids={key: np.concatenate(all_ids) if all_ids else np.empty(0, self._dtype)
                 for key, all_ids in documents.items()},
            lengths={key: [len(ids) for ids in all_ids] for key, all_ids in documents.items()},
            skipped=skipped,
            line_count=len(piece.lines),
            size_bytes=sum(map(len, piece.lines)),
        )

    def encode_line(self, line: bytes) -> dict[str, np.ndarray]:
        """The ids under each key. All keys or none: documents of one line keep the same place in every output."""
        record = parse_record(line)
        return {key: self._encode_text(key, text_under(record, key)) for key in self._keys}

    def _encode_text(self, key: str, text: str) -> np.ndarray:
        try:
            ids = self._tokenizer.tokenize(text)
        except Exception as error:  # each tokenizer library has exceptions of its own
            raise BadLine("text that the tokenizer refuses",
                          f"the tokenizer refuses the text under '{key}' ({' '.join(str(error).split())})") from error
        if len(ids) == 0:
            raise BadLine("empty document", f"the text under '{key}' has no tokens")
        if not (0 <= min(ids) and max(ids) < self._id_limit):
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise BadLine("token outside the vocabulary",
                          f"token {outside} under '{key}' is outside the vocabulary (0 to {self._id_limit - 1})")
        if self._end_id is not None:
            ids = [*ids, self._end_id]
        return np.array(ids, dtype=self._dtype)


def parse_record(line: bytes) -> dict:
    """The JSON object on a line; `BadLine` where there is none."""
    try:
        # -sig: some editors start a file with a byte-order mark.
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"not UTF-8 ({error.reason} at byte {error.start + 1})") from error
    if not text.strip():
        raise BadLine("blank line", "blank line")
    try:
        # Without its line break: a line that is cut off would otherwise be at fault on the next one.
        record = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise BadLine("broken JSON", f"broken JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise BadLine("broken JSON", "broken JSON (nested too deeply)") from error
    if not isinstance(record, dict):
        raise BadLine("not a JSON object", f"a JSON {type(record).__name__}, not an object with keys")
    return record


def text_under(record: dict, key: str) -> str:
    """The text under `key`; `BadLine` where there is none."""
    if key not in record:
        held = ", ".join(f"'{name}'" for name in list(record)[:8]) or "none"
        raise BadLine("missing key", f"missing key '{key}' (the line has: {held})")
    text = record[key]
    if not isinstance(text, str):
        raise BadLine("value that is not text", f"the value under '{key}' is a {type(text).__name__}, not text")
    if not text.strip():
        raise BadLine("empty document", f"empty document (no text under '{key}')")
    return text
