"""Actions that the group requests of its service, in the order of `WorkerGroup.take_actions`."""

from dataclasses import dataclass

from protocol.block_names import NamedBlocks
from protocol.membership import GroupMessage, Loaded
from protocol.steps import KeepPins, LoadBlocks
from services.scheduler.core.limits import Limits


@dataclass(frozen=True)
class Send:
    """Send a message to a worker.

    `everywhere`: on all connections of the worker, because its executing thread may hang.
    """

    peer: bytes
    message: GroupMessage | LoadBlocks
    everywhere: bool = False


@dataclass(frozen=True)
class Refuse:
    """Turn a worker away for good."""

    peer: bytes
    reason: str


@dataclass(frozen=True)
class Started:
    """An epoch is in effect: steps may be dispatched to `peers`, which are in the order of their ranks."""

    epoch: int
    peers: list[bytes]
    limits: Limits
    loaded: Loaded
    held: NamedBlocks | None = None
    """Whole blocks that all ranks hold; None: there is none."""
    kv_peers: tuple[str, ...] = ()
    """`Loaded.kv_peer` of each rank; (): not all have one."""
    bytes_per_block: int = 0
    """Bytes of a KV block on all ranks together."""
    pins: KeepPins | None = None
    """Pins of the last scheduler; None: no rank has any."""


@dataclass(frozen=True)
class Ended:
    """The epoch that was in effect is over: nothing in flight will return."""

    epoch: int
    reason: str
    is_fault: bool = True
    """A rank was lost, perhaps by a request; otherwise another size fits the workers better, or the next epoch retries
    with smaller steps."""


@dataclass(frozen=True)
class FailRequests:
    """End all open requests with this error."""

    error: str


@dataclass(frozen=True)
class News:
    """A worker came or was lost: a line for the log."""

    text: str


Action = Send | Refuse | Started | Ended | FailRequests | News
