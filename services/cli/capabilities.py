"""`runahead capabilities`: the table of supported combinations."""

import sys

from services.scheduler.capabilities import table


def show() -> None:
    """Print one line per combination, with the reason where it is refused."""
    for combination, reason in table():
        sys.stdout.write(f"{combination!s:89} {f'refused: {reason}' if reason else 'works'}\n")
