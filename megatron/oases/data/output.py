"""Writing .bin/.idx pairs that are either whole or absent.

Megatron's builder writes the final files from the first document on; a run that dies leaves a .bin that grew and an
index of the last run beside it. Here both are written under temporary names and renamed when all is well.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


class PairWriter:
    """One pair, `PREFIX.bin` and `PREFIX.idx`."""

    def __init__(self, prefix: str, dtype: type[np.integer]):
        self.prefix = prefix
        self.dtype = dtype
        self.document_count = 0
        self.token_count = 0
        self._temporary = f"{prefix}.partial-{os.getpid()}"
        self._builder = IndexedDatasetBuilder(get_bin_path(self._temporary), dtype=dtype)

    def add(self, ids: np.ndarray, lengths: Sequence[int]) -> None:
        """Adds documents whose ids stand end to end in `ids`."""
        start = 0
        for length in lengths:
            self._builder.add_document(ids[start:start + length], [length])
            start += length
        self.document_count += len(lengths)
        self.token_count += start

    def finish(self) -> None:
        """Writes the index, still under a temporary name."""
        self._builder.finalize(get_idx_path(self._temporary))

    def publish(self) -> None:
        """Gives both files their names. The old index goes first: an index never stands beside another run's data."""
        with suppress(FileNotFoundError):
            os.remove(get_idx_path(self.prefix))
        os.replace(get_bin_path(self._temporary), get_bin_path(self.prefix))
        os.replace(get_idx_path(self._temporary), get_idx_path(self.prefix))

    def discard(self) -> None:
        """Removes what was written under temporary names; nothing to do after `publish`."""
        with suppress(OSError):  # closing flushes, which fails where the disk is full
            self._builder.data_file.close()
        for path in (get_bin_path(self._temporary), get_idx_path(self._temporary)):
            with suppress(FileNotFoundError):
                os.remove(path)
