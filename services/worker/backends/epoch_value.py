"""A value that a runner holds during an epoch and never outside of one."""

from typing import Generic, TypeVar

T = TypeVar("T")


class EpochValue(Generic[T]):
    """Holds what one call of a `ModelRunner` makes for the rest of the epoch.

    `set` is called by the call that makes the value, `end` by `leave`. `get` may be called on any thread.

    Args:
        made_by: name of the call that makes the value, for the error.
    """

    def __init__(self, made_by: str) -> None:
        self._made_by = made_by
        self._value: T | None = None

    def set(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        """Raises: RuntimeError, outside of an epoch."""
        if self._value is None:
            raise RuntimeError(f"{self._made_by} must be called first in each epoch")
        return self._value

    def peek(self) -> T | None:
        """Return the value, or None outside of an epoch. May be called on any thread."""
        return self._value

    def end(self) -> T | None:
        """Drop the value, and return it, if there is one, for its owner to close."""
        value, self._value = self._value, None
        return value
