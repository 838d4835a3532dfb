"""Structural tags: text of which some parts must match schemas, in vLLM's old form (structures and triggers) and in its
new one (format)."""

from typing import Any

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_TAGS
from services.scheduler.grammar.translate.json_text import parse_json
from services.scheduler.grammar.translate.tag_formats import IsSpecial, TagFormats


def tags_to_lark(text: str, is_special: IsSpecial) -> str:
    """Return the Lark grammar for `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, or for
    `{"format": ...}`.

    Raises: GrammarError
    """
    content = parse_json(text, "structural tag")
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
