"""The scheduler's leadership, without a clock of its own."""


class Leadership:
    """The scheduler's right to go on.

    Frontends and workers look for another scheduler when this one was silent for a number of seconds. A scheduler that
    did not run for as long, because its process was stopped, may have been replaced. It must not send anything any
    more.
    """

    def __init__(self, silence: float, now: float) -> None:
        """
        Args:
            silence: seconds after which the others look for another scheduler.
            now: when this scheduler began, before it binds its endpoints.
        """
        self._silence = silence
        self._sent = now

    def on_sign_of_life(self, now: float) -> None:
        self._sent = now

    def lost(self, now: float, replaced: bool) -> str | None:
        """Return why this scheduler must exit, or None. Call it in each turn, before anything is sent.

        Args:
            replaced: another scheduler serves this endpoint.
        """
        pause = now - self._sent
        if pause > self._silence:
            return f"this scheduler did not run for {pause:.1f} s, and the others have turned to another one"
        return "another scheduler has taken the place of this one" if replaced else None
