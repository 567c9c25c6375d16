"""Encoding pieces in several processes, results in the order of the input.

An executor rather than multiprocessing.Pool: the pool waits for ever when a worker is killed, and reads the whole input
ahead of its workers.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron.oases.data.encode import EncodedPiece, Encoder
from megatron.oases.data.lines import Piece
from megatron.oases.errors import UsageError

# Enough that no worker waits, few enough that a fast reader cannot fill the memory.
_PIECES_IN_FLIGHT_PER_WORKER = 4

# One encoder a worker process, set by the executor's initializer; it stays None in the parent.
_worker_encoder: Encoder | None = None


def encode_in_order(encoder: Encoder, pieces: Iterator[Piece], workers: int) -> Iterator[EncodedPiece]:
    """Encodes `pieces` in `workers` processes, or in this one where `workers` is 1. Close it to end the processes."""
    if workers == 1:
        yield from map(encoder.encode, pieces)
        return
    # Forked workers inherit the tokenizer, whatever it is; not every tokenizer can be pickled.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker, (encoder,))
    in_flight = deque()
    try:
        for piece in pieces:
            in_flight.append(executor.submit(_encode_in_worker, piece))
            if len(in_flight) == workers * _PIECES_IN_FLIGHT_PER_WORKER:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise UsageError(f"--workers {workers}: a worker was killed, perhaps for lack of memory; try fewer") from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # Ctrl-C reaches every process of the terminal; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A parent that was killed cannot.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_in_worker(piece: Piece) -> EncodedPiece:
    return _worker_encoder.encode(piece)
