"""One translation for each `GrammarKind`."""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_ALTERNATIVES, MAX_DEPTH, MAX_TAGS
from services.scheduler.grammar.translate.json_schema import check_schema, schema_to_grammar
from services.scheduler.grammar.translate.regex import check_lark, check_regex, ecma_classes
from services.scheduler.grammar.translate.tag_formats import IsSpecial, TagFormats


def tags_to_lark(text: str, is_special: IsSpecial) -> str:
    """Return the Lark grammar for `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, or for
    `{"format": ...}`.

    Raises: GrammarError
    """
    content = _parse_json(text, "structural tag")
    is_new = isinstance(content, dict) and "format" in content
    formats = TagFormats(is_special)
    start = formats.body(content["format"] if is_new else _triggered(content))
    return "\n".join(["%llguidance {}", f"start: {start}", *formats.rules])


def _triggered(content: Any) -> dict[str, Any]:
    """Return the old form as a new one. Raises: GrammarError"""
    structures, triggers = _parts(content)
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure["end"],
        }
        for structure in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _parts(content: Any) -> tuple[list[dict[str, Any]], list[str]]:
    fields = content if isinstance(content, dict) else {}
    structures, triggers = fields.get("structures"), fields.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise GrammarError('a structural tag needs lists of "structures" and "triggers"')
    if len(structures) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise GrammarError(f"at most {MAX_TAGS} structures and triggers are allowed")
    for structure in structures:
        texts = [structure.get("begin"), structure.get("end")] if isinstance(structure, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise GrammarError('each structure needs texts "begin" and "end", and a "schema"')
    return structures, triggers


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
            return schema_to_grammar(check_schema(_parse_json(text, "JSON schema")))
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


def _parse_json(text: str, what: str) -> Any:
    """Return the JSON value. Raises: GrammarError, in which `what` names the text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarError(f"the {what} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"the {what} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _choices_to_lark(text: str) -> str:
    choices = _parse_json(text, "choice")
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
