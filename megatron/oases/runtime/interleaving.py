"""Puts a micro-batch's backward pass off, to run together with the next one's forward pass.

Megatron's loop runs one micro-batch forward and backward, then the next. Where a stage begins with the embedding, nobody
waits for what its backward pass returns; so it may as well run when the next forward pass has begun. The loop
itself stays as it is.
"""

from collections.abc import Callable

from megatron.oases.runtime.cell import Tape


class Interleaving:
    """Decides which backward passes are put off.

    Args:
        micro_batches: tells how many micro-batches the present iteration has; 1 means that nothing is put off.
        last_apart: whether the last micro-batch's forward pass may not be interleaved.
    """

    def __init__(self, micro_batches: Callable[[], int], *, last_apart: bool):
        self._micro_batches = micro_batches
        self._last_apart = last_apart
        self.reset()

    def reset(self) -> None:
        """Forgets the iteration, after an error in it."""
        self._begun = 0  # forward passes of this iteration
        self._newest: Tape | None = None
        self._put_off: Tape | None = None

    def begin(self, tape: Tape) -> Tape | None:
        """Notes a forward pass; returns the micro-batch whose backward pass is to run with it."""
        self._begun += 1
        self._newest = tape
        put_off, self._put_off = self._put_off, None
        return put_off

    def puts_off(self, tape: Tape) -> bool:
        """Whether the backward pass of `tape`, which is due, is put off."""
        to_come = self._micro_batches() - self._begun
        if tape is self._newest and to_come > int(self._last_apart):
            self._put_off = tape
            return True
        if to_come <= 0:
            self.reset()
        return False

    def end_iteration(self) -> None:
        """Checks that every backward pass of the iteration has run, before its gradients are used.

        Raises:
            RuntimeError: one is still put off. The loop announced more micro-batches than it ran.
        """
        begun, is_waiting = self._begun, self._put_off is not None
        self.reset()
        if is_waiting:
            raise RuntimeError(
                f"the training loop announced {self._micro_batches()} micro-batches and ran {begun}: "
                "the backward pass of the last one is missing"
            )
