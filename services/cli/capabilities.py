"""`runahead capabilities`: the table of what can be combined."""

import sys

from services.scheduler.capabilities import table


def show() -> None:
    """One line per combination; what is refused says why."""
    for combination, reason in table():
        sys.stdout.write(f"{combination!s:63} {f'refused: {reason}' if reason else 'works'}\n")
