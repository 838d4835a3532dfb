"""Leases of frontends, without a clock of their own. A frontend renews its lease with every message.

A frontend that never sent a sign of life has no lease; only the loss of its connection ends its requests.
"""


class Leases:
    def __init__(self, seconds: float) -> None:
        """`seconds`: duration of a lease."""
        self._seconds = seconds
        self._heard: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def grant(self, frontend: int, now: float) -> None:
        """A sign of life has arrived."""
        self._heard[frontend] = now

    def renew(self, frontend: int, now: float) -> None:
        """Any other message has arrived."""
        if frontend in self._heard:
            self._heard[frontend] = now

    def end(self, frontend: int) -> None:
        self._heard.pop(frontend, None)

    def expired(self, now: float) -> list[int]:
        """Return the frontends whose lease is over. Call it after everything that has arrived was read."""
        return [frontend for frontend, heard in self._heard.items() if now - heard > self._seconds]
