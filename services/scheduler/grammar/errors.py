"""Errors about a grammar. Their texts are sent to the client."""

import re

MAX_REASON_CHARS = 200
"""Longest reason of the library that an error repeats."""

_TOO_COMPLEX = ("too many", "too big", "too large", "too complex", "fuel", "limit", "max is", "timeout")


_ROW = re.compile(r"row has (\d+) items; max is (\d+)")


class GrammarError(ValueError):
    """The grammar cannot be served. The text gives the reason."""


def too_complex(what: str) -> GrammarError:
    return GrammarError(f"the {what} is too complex: it would take too much time or memory; simplify it")


def row_limit(error: str) -> str | None:
    """Return the limit of alternatives that llguidance's text is about, None if it is about something else."""
    if (found := _ROW.search(error)) is None:
        return None
    have, most = map(int, found.groups())
    return f"{have:,} alternatives at one place of the output, at most {most:,} can be served"


def from_library(what: str, error: str) -> GrammarError:
    """Make an error from a text of llguidance.

    Only the first line is used, or the line with the reason if it is about a regular expression; the other lines show
    internal state.
    """
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or [""]
    reasons = [line for line in lines if line.startswith("error: ")]
    reason = " ".join((reasons or lines)[0].removeprefix("error: ").split()).split(". Enable ")[0]
    if reason.startswith("NoExtension"):
        return GrammarError(f"nothing can match the {what}")
    if (found := row_limit(error)) is not None:
        return GrammarError(f"the {what} is too complex: {found}; simplify it")
    if any(word in reason.lower() for word in _TOO_COMPLEX):
        return too_complex(what)
    if len(reason) > MAX_REASON_CHARS:
        reason = reason[:MAX_REASON_CHARS] + "…"
    return GrammarError(f"the {what} cannot be used: {reason}" if reason else f"the {what} cannot be used")
