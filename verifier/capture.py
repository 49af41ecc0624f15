"""What the two ways to capture a graph have in common: on a GPU a CUDA graph, else a recording."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class CaptureError(RuntimeError):
    """A graph could not be captured. State and device are as before the attempt."""


class Captured(Protocol):
    """A captured call, to be replayed on the same memory."""

    num_bytes: int  # device memory the capture took; 0 where an earlier one's was enough

    @property
    def outputs(self) -> Any:
        """What the call returned: the same tensors for ever, overwritten by each replay.

        On CUDA they do not own their memory, which other graphs of the pool may use for their own
        work: read them before the next replay of any of them.
        """

    def replay(self) -> None:
        """Runs the captured work on the current values of its static tensors."""

    def hand_over_outputs(self) -> Any:
        """The outputs as owners of their memory, once, right after the capture.

        While the caller holds them, the next capture leaves their memory alone: so the pieces of a
        model, captured one after the other, can feed each other. Their values are undefined, since
        a capture does not run anything.
        """


class CaptureBackend(Protocol):
    """Captures calls on one kind of device."""

    def capture(self, fn: Callable[[], Any]) -> Captured:
        """Captures ``fn()`` without an effect on any tensor that exists already.

        Raises what ``fn`` raises, or ``CaptureError`` with the operator's name where ``fn`` does
        what a graph cannot hold; in both cases the device can be used afterwards.
        """

    def stream(self) -> AbstractContextManager[object]:
        """Work under it runs where captures run; warm-up belongs there."""
