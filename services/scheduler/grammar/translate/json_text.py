"""JSON texts from requests."""

import json
from typing import Any

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_DEPTH


def parse_json(text: str, what: str) -> Any:
    """Return the JSON value. Raises: GrammarError, in which `what` names the text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarError(f"the {what} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"the {what} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
