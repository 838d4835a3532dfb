"""The interface between the simulator and its device."""

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray


class DeviceEvent(Protocol):
    """A point on the device's timeline.

    Times are seconds of the monotonic clock, valid after `synchronize`; on `SimDevice` at once.
    """

    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    def synchronize(self) -> None:
        """Wait, without spinning, until the device has reached this point.

        Raises: the error of any work up to this point.
        """


class Device(Protocol):
    """A device that executes in order. Every call but `settle` returns at once."""

    def copy_in(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy from host to device. `source` must not change before a later event has passed."""

    def record(self) -> DeviceEvent: ...

    def launch(self, work: Callable[[], None], seconds: float, not_before: float = 0.0) -> DeviceEvent:
        """Run `work` on the device, for `seconds` of its time that begin at `not_before` or later."""

    def settle(self) -> None:
        """Wait until all work so far is done, although its modelled time may not be over.

        Raises: the error of any work so far.
        """

    def copy_out(self, source: NDArray[Any]) -> tuple[NDArray[Any], DeviceEvent]:
        """Copy from device to host. Return an array that is valid once the event has passed.

        `source` must not change until then.
        """

    def close(self) -> None: ...
