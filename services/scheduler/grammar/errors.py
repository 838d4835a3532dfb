"""What is wrong with a grammar, in words that are fit for the client's eyes."""

MAX_REASON = 200
"""Characters of the library's own reason that are passed on."""

_TOO_COMPLEX = ("too many", "too big", "too large", "too complex", "fuel", "limit", "max is", "timeout")


class GrammarError(ValueError):
    """It cannot be served; the text says why."""


def too_complex(what: str) -> GrammarError:
    return GrammarError(f"the {what} is too complex: it would take too much time or memory; simplify it")


def from_library(what: str, error: str) -> GrammarError:
    """Its first line alone, of a regular expression's errors the one that says why: the rest is internal state."""
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or [""]
    why = [line for line in lines if line.startswith("error: ")]
    reason = " ".join((why or lines)[0].removeprefix("error: ").split()).split(". Enable ")[0]
    if reason.startswith("NoExtension"):
        return GrammarError(f"nothing can match the {what}")
    if any(word in reason.lower() for word in _TOO_COMPLEX):
        return too_complex(what)
    if len(reason) > MAX_REASON:
        reason = reason[:MAX_REASON] + "…"
    return GrammarError(f"the {what} cannot be used: {reason}" if reason else f"the {what} cannot be used")
