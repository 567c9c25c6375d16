"""A world of gloo ranks that stays up and runs one test case after the other.

Importing Megatron takes seconds a rank; so the ranks are started once for each world size and are then handed functions.
"""

import faulthandler
import logging
import multiprocessing as mp
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CASE_TIMEOUT_S = 180


class World:
    """`size` processes, each a rank of a gloo world with tensor parallelism of that size.

    A case is a module-level function `case(rank, **arguments)` of picklable arguments; what it returns comes back, one
    value for each rank. A rank that fails or hangs fails the test; if the ranks are out of step then, the world is ended
    and the next case starts a new one.
    """

    def __init__(self, size: int):
        self.size = size
        self._processes: list[mp.Process] = []
        self._pipes: list[Any] = []

    def run(self, case: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            # After one failure the others may wait for it for ever.
            if not pipe.poll(CASE_TIMEOUT_S if not failures else 5):
                failures.append(f"rank {rank}: no answer")
                continue
            succeeded, value = pipe.recv()
            (results if succeeded else failures).append(value if succeeded else f"rank {rank}:\n{value}")
        if failures:
            if results or len(failures) < self.size or any("no answer" in failure for failure in failures):
                self.close()  # the ranks are no longer in step
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    from megatron.oases.host import activate

    activate()
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", timeout=timedelta(seconds=CASE_TIMEOUT_S))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    while True:
        case, arguments = pipe.recv()
        faulthandler.dump_traceback_later(CASE_TIMEOUT_S - 10)  # shows where a rank hangs
        try:
            pipe.send((True, case(rank, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            _end_unused_groups()


def _end_unused_groups() -> None:
    """Ends what a case has made. gloo has threads for each group that wake up a hundred times a second: they add up."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    used = {dist.group.WORLD}
    for value in vars(parallel_state).values():
        used |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dist.ProcessGroup)}
    for group in set(dist.distributed_c10d._world.pg_map) - used:
        dist.destroy_process_group(group)
