"""Structural tags: free text, in which a trigger starts a part that must match a schema."""

import json
from collections.abc import Callable
from typing import Any

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_TAGS
from services.scheduler.grammar.translate.json_schema import check_schema
from services.scheduler.grammar.translate.json_text import parse_json

IsSpecial = Callable[[str], bool]
"""Returns whether a text is a special token of the model. Plain text never contains one."""


def tags_to_lark(text: str, is_special: IsSpecial) -> str:
    """Return the Lark grammar for `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`.

    Raises: GrammarError
    """
    content = parse_json(text, "structural tag")
    if isinstance(content, dict) and "format" in content:
        raise GrammarError('structural tags with "format" are not served; use "structures" and "triggers"')
    structures, triggers = _parts(content)
    rules = [_rule(number, structure, triggers, is_special) for number, structure in enumerate(structures)]
    names = " | ".join(f"tag_{number}" for number in range(len(rules)))
    return "\n".join(
        ["%llguidance {}", f"start: ({names})* tag_end", "tag_end: TAG_TEXT", r"TAG_TEXT: /(.|\n)*/", *rules]
    )


def _parts(content: Any) -> tuple[list[dict[str, Any]], list[str]]:
    fields = content if isinstance(content, dict) else {}
    structures, triggers = fields.get("structures"), fields.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise GrammarError('a structural tag needs lists of "structures" and "triggers"')
    if len(structures) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise GrammarError(f"at most {MAX_TAGS} structures and triggers are allowed")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("each trigger of a structural tag must be a text that is not empty")
    for structure in structures:
        texts = [structure.get("begin"), structure.get("end")] if isinstance(structure, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise GrammarError('each structure needs texts "begin" and "end", and a "schema"')
    return structures, triggers


def _rule(number: int, structure: dict[str, Any], triggers: list[str], is_special: IsSpecial) -> str:
    begin, end = structure["begin"], structure["end"]
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise GrammarError('the "begin" of each structure must begin with one of the triggers')
    schema = check_schema(structure.get("schema", {})) | {"x-guidance": {"whitespace_flexible": False}}
    parts = [_literal(begin[len(trigger) :]), f"%json {json.dumps(schema)}", _literal(end, is_special)]
    body = " ".join(filter(None, parts))
    if is_special(trigger):
        return f"tag_{number}: TAG_TEXT {trigger} {body}"
    return (
        f"tag_{number}_trigger[lazy]: TAG_TEXT {_literal(trigger)}\ntag_{number}: tag_{number}_trigger {body}"
    )


def _literal(text: str, is_special: IsSpecial = lambda _: False) -> str:
    if not text:
        return ""
    return text if is_special(text) else json.dumps(text, ensure_ascii=False)
