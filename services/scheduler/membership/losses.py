"""Epochs that were lost, and the limit on those that brought nothing."""

MAX_FUTILE_EPOCHS = 5
"""Epochs in a row that may end by a fault without having finished a step."""
PROVEN_AFTER = 60.0
"""Seconds in effect after which an epoch counts as useful even if no step was requested."""


class Losses:
    def __init__(self) -> None:
        self.total = 0
        """Epochs that ended by a fault."""
        self.futile = 0
        """Such epochs after the last useful one."""
        self.last = ""
        """The last fault; "" once an epoch is in effect."""
        self._started_at = 0.0
        self._useful_epoch = 0

    @property
    def hopeless(self) -> bool:
        return self.futile >= MAX_FUTILE_EPOCHS

    def is_proven(self, now: float) -> bool:
        """Return whether the epoch in effect counts as useful by its age."""
        return now - self._started_at >= PROVEN_AFTER

    def on_start(self, now: float) -> None:
        """An epoch is in effect."""
        self._started_at, self.last = now, ""

    def on_useful(self, epoch: int) -> None:
        """This epoch has finished a step."""
        self.futile, self._useful_epoch = 0, epoch

    def on_explained(self) -> None:
        """The cause of the last fault is found, and will not return."""
        self.futile = 0

    def on_end(self, epoch: int, now: float) -> None:
        """An epoch that was in effect has ended, for whatever reason."""
        if self.is_proven(now):
            self.on_useful(epoch)

    def on_fault(self, epoch: int, reason: str) -> None:
        """An epoch has ended by a fault, after `on_end` if it was in effect."""
        self.last = reason
        self.total += 1
        self.futile += epoch != self._useful_epoch
