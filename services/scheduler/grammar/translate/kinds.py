"""One translation for each `GrammarKind`."""

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_ALTERNATIVES, MAX_DEPTH
from services.scheduler.grammar.translate.json_schema import check_schema, schema_to_grammar
from services.scheduler.grammar.translate.json_text import parse_json
from services.scheduler.grammar.translate.regex import check_lark, check_regex, ecma_classes
from services.scheduler.grammar.translate.structural_tags import tags_to_lark
from services.scheduler.grammar.translate.tag_formats import IsSpecial

KIND_NAMES = {
    GrammarKind.JSON: "JSON schema",
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural tag",
}
"""Names of the kinds in errors for clients."""


def translate(params: StructuredOutputParams, is_special: IsSpecial) -> str:
    """Return llguidance's grammar. Raises: GrammarError, with a text for the client."""
    text = params.text
    match params.kind:
        case GrammarKind.JSON:
            return schema_to_grammar(check_schema(parse_json(text, "JSON schema")))
        case GrammarKind.JSON_OBJECT:
            return schema_to_grammar({"type": "object"})
        case GrammarKind.REGEX:
            check_regex(text)
            return str(LLMatcher.grammar_from_regex(ecma_classes(text)))
        case GrammarKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choices_to_lark(text)))
        case GrammarKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(_grammar_to_lark(text)))
        case GrammarKind.STRUCTURAL_TAG:
            return str(LLMatcher.grammar_from_lark(tags_to_lark(text, is_special)))


def _choices_to_lark(text: str) -> str:
    choices = parse_json(text, "choice")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice must be a list of texts")
    if not 0 < len(choices) <= MAX_ALTERNATIVES:
        raise GrammarError(f"choice must have between 1 and {MAX_ALTERNATIVES} texts, got {len(choices)}")
    alternatives = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return "start: " + " | ".join(alternatives)


def _grammar_to_lark(text: str) -> str:
    """Return a Lark grammar as it is, and GBNF as Lark. GBNF defines a rule with `::=`, Lark with a colon alone."""
    check_lark(text)
    lines = (line.split("#")[0].split("//")[0] for line in text.splitlines())
    if not any("::=" in line for line in lines):
        return text
    try:
        lark: str = gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError(f"the grammar is nested more than {MAX_DEPTH} levels deep") from None
    except Exception as error:  # llguidance raises its own errors here and, on some texts, arbitrary ones
        reason = str(error).split(" at line")[0]
        raise GrammarError(f"the grammar cannot be read as GBNF: {reason}") from None
    check_lark(lark)
    return lark
