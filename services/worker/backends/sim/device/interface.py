"""The interface between the simulator and its device."""

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from services.worker.backends.clock import Clock

Inputs = Callable[[], float]
"""Waits for inputs from other ranks, and returns when they arrived: monotonic seconds."""


def no_inputs() -> float:
    return 0.0


class DeviceEvent(Protocol):
    """A point on the device's timeline.

    Times are seconds of the monotonic clock, valid after `synchronize` or `reach`, and for later work on the device.
    """

    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    def reach(self) -> None:
        """Wait until all work up to this point is done, although its modelled time may not be over.

        Raises: the error of any work up to this point.
        """

    def synchronize(self) -> None:
        """Wait, without spinning, until the device has reached this point.

        Raises: the error of any work up to this point.
        """


class Device(Protocol):
    """A device that executes in order. No call waits for masks."""

    clock: Clock

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy from host to device. `source` must not change before a later event has passed."""

    def record(self) -> DeviceEvent: ...

    def launch(self, work: Callable[[], None], seconds: float, inputs: Inputs = no_inputs) -> DeviceEvent:
        """Run `work` on the device, for `seconds` of its time that begin when `inputs` have arrived or later."""

    def wait_for_masks(self, taken: Callable[[], float]) -> None:
        """Let all later work wait until `taken` returns: when masks arrived, monotonic seconds. It is called on another
        thread than this one, which delivers the masks."""

    def settle(self) -> None:
        """Raises: the error of the work that was done so far."""

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], DeviceEvent]:
        """Copy from device to host. Return an array that is valid once the event has passed.

        `source` must not change until then.
        """

    def close(self) -> None: ...
