"""`runahead capabilities`: the table of supported combinations."""

import sys

from services.scheduler.capabilities import table


def show() -> None:
    """Print one line per combination, with the reason where it is refused, below a heading for each group."""
    group = ""
    for combination, reason in table():
        heading, _, rest = str(combination).partition(" backend")
        heading += " backend"
        if heading != group:
            sys.stdout.write(f"{'' if not group else chr(10)}{heading}\n")
            group = heading
        features = rest.removeprefix(", ") or "plain"
        sys.stdout.write(f"  {features:26} {f'refused: {reason}' if reason else 'works'}\n")
