"""From what a request asks for to the library's grammar. Runs in the trial process: it works on hostile text."""

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_ALTERNATIVES, MAX_DEPTH
from services.scheduler.grammar.regex import check_embedded, check_regex
from services.scheduler.grammar.schema import checked, from_schema, read
from services.scheduler.grammar.tags import IsSpecial, from_tags

NAMES = {
    GrammarKind.JSON: "JSON schema",
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural tag",
}
"""What clients are told it is."""


def translate(params: StructuredOutputParams, is_special: IsSpecial) -> str:
    """Raises: GrammarError, whose text is for the client."""
    text = params.text
    match params.kind:
        case GrammarKind.JSON:
            return from_schema(checked(read(text, "JSON schema")))
        case GrammarKind.JSON_OBJECT:
            return from_schema({"type": "object"})
        case GrammarKind.REGEX:
            check_regex(text)
            return str(LLMatcher.grammar_from_regex(text))
        case GrammarKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choices(text)))
        case GrammarKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(_lark(text)))
        case GrammarKind.STRUCTURAL_TAG:
            return str(LLMatcher.grammar_from_lark(from_tags(text, is_special)))


def _choices(text: str) -> str:
    choices = read(text, "choice")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice must be a list of texts")
    if not 0 < len(choices) <= MAX_ALTERNATIVES:
        raise GrammarError(f"choice must have between 1 and {MAX_ALTERNATIVES} texts, got {len(choices)}")
    alternatives = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return "start: " + " | ".join(alternatives)


def _lark(text: str) -> str:
    """GBNF defines by `::=`, Lark by a colon alone."""
    check_embedded(text)
    lines = (line.split("#")[0].split("//")[0] for line in text.splitlines())
    if not any("::=" in line for line in lines):
        return text
    try:
        lark: str = gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError(f"the grammar is nested more than {MAX_DEPTH} levels deep") from None
    except Exception as error:  # the library's own, and what it did not foresee
        reason = str(error).split(" at line")[0]
        raise GrammarError(f"the grammar cannot be read as GBNF: {reason}") from None
    check_embedded(lark)
    return lark
