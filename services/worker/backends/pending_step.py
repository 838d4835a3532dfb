"""The step between its forward pass and its sampling, which every runner holds."""

from typing import Generic, TypeVar

S = TypeVar("S")


class PendingStep(Generic[S]):
    """At most one step that is executed and not sampled: the single pending state (docs/invariants.md)."""

    def __init__(self) -> None:
        self._executed: tuple[int, S] | None = None
        """Its number, and the step."""

    def require_none(self) -> None:
        """Raises: RuntimeError, if the step before was executed but never sampled."""
        if self._executed is not None:
            raise RuntimeError(f"step {self._executed[0]} was executed but never sampled")

    def put(self, step_id: int, executed: S) -> None:
        """Raises: RuntimeError, if the step before was executed but never sampled."""
        self.require_none()
        self._executed = step_id, executed

    def take(self) -> S:
        """Return the executed step; none is pending afterwards.

        Raises: RuntimeError, if no step was executed.
        """
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("no step was executed that could be sampled")
        return executed[1]
