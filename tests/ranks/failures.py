"""The failure of a rank in another process."""


class RankFailure(Exception):
    """The name of the exception that a rank raised, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
