"""Formats of structural tags as Lark rules. The names of formats and fields are xgrammar's, which vLLM uses."""

import json
from collections.abc import Callable
from typing import Any

from services.scheduler.grammar.errors import GrammarError
from services.scheduler.grammar.limits import MAX_DEPTH, MAX_TAGS
from services.scheduler.grammar.translate.json_schema import check_schema
from services.scheduler.grammar.translate.regex import check_regex, ecma_classes

IsSpecial = Callable[[str], bool]
"""Returns whether a text is a special token of the model. Plain text never contains one."""
_TEXT = "TAG_TEXT"
"""Terminal of any text."""
SERVED = (
    "const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags", "tags_with_separator"
)  # fmt: skip


class TagFormats:
    """Translates formats; `rules` are the rules that their bodies refer to."""

    def __init__(self, is_special: IsSpecial) -> None:
        self.rules = [rf"{_TEXT}: /(.|\n)*/"]
        self._is_special = is_special
        self._num_formats = 0
        self._num_names = 0

    def body(self, format: Any, depth: int = 0) -> str:
        """Return the body of a rule, "" for the empty text. Raises: GrammarError"""
        self._num_formats += 1
        if self._num_formats > 4 * MAX_TAGS or depth > MAX_DEPTH:
            raise GrammarError(f"a structural tag has at most {4 * MAX_TAGS} parts, {MAX_DEPTH} levels deep")
        kind = format.get("type") if isinstance(format, dict) else None
        match kind:
            case "const_string":
                return self._literal(_text(format, "value"))
            case "json_schema":
                return _json(format)
            case "regex":
                return _regex(_text(format, "pattern"))
            case "any_text":
                _refuse(format, "excludes")
                return _TEXT
            case "sequence":
                parts = (self.body(element, depth + 1) for element in _list(format, "elements"))
                return " ".join(filter(None, parts))
            case "or":
                parts = (self.body(element, depth + 1) or '""' for element in _list(format, "elements"))
                return f"({' | '.join(parts)})"
            case "tag":
                return self._tag(format, depth)
            case "triggered_tags":
                return self._triggered(format, depth)
            case "tags_with_separator":
                return self._separated(format, depth)
        raise GrammarError(f"a structural tag has formats of the types {', '.join(SERVED)}, not {str(kind)[:40]!r}")

    def _tag(self, format: Any, depth: int, skipped: int = 0) -> str:
        """`skipped`: characters of the tag's begin that were read before."""
        begin = self._literal(_text(format, "begin")[skipped:])
        content, ends = format.get("content"), format.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError('each tag needs a text "begin", a "content", and a text "end"')
        alternatives = [self._ended(content, end, depth) for end in ends]
        rest = alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"
        return " ".join(filter(None, [begin, rest]))

    def _ended(self, content: Any, end: str, depth: int) -> str:
        """Return a content and its end; any text ends where `end` first occurs."""
        body, literal = self.body(content, depth + 1), self._literal(end)
        if body != _TEXT or not end or self._is_special(end):
            return " ".join(filter(None, [body, literal]))
        name = self._name("text")
        self.rules.append(f"{name}[lazy]: {_TEXT} {literal}")
        return name

    def _triggered(self, format: Any, depth: int) -> str:
        _refuse(format, "excludes")
        triggers = _list(format, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError("each trigger of a structural tag must be a text that is not empty")
        tags = [self._after_text(tag, triggers, depth + 1) for tag in _list(format, "tags")]
        any_tag, least = f"({' | '.join(tags)})", "+" if format.get("at_least_one") else "*"
        if not format.get("stop_after_first"):
            return f"{any_tag}{least} {_TEXT}"
        return any_tag if least == "+" else f"({any_tag} | {_TEXT})"

    def _after_text(self, tag: Any, triggers: list[str], depth: int) -> str:
        """Return a rule: any text up to the first trigger, then the rest of the tag."""
        begin = _text(tag, "begin")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError('the "begin" of each structure must begin with one of the triggers')
        body, name = self._tag(tag, depth, len(trigger)), self._name("tag")
        if self._is_special(trigger):
            self.rules.append(f"{name}: {_TEXT} {trigger} {body}")
            return name
        self.rules.append(f"{name}_trigger[lazy]: {_TEXT} {self._literal(trigger)}")
        self.rules.append(f"{name}: {name}_trigger {body}")
        return name

    def _separated(self, format: Any, depth: int) -> str:
        tags = [self._tag(tag, depth + 1) for tag in _list(format, "tags")]
        separator, any_tag = self._literal(_text(format, "separator")), f"({' | '.join(tags)})"
        several = any_tag if format.get("stop_after_first") else f"{any_tag} ({separator} {any_tag})*"
        return several if format.get("at_least_one") else f"({several})?"

    def _literal(self, text: str) -> str:
        if not text:
            return ""
        return text if self._is_special(text) else json.dumps(text, ensure_ascii=False)

    def _name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}_{self._num_names}"


def _text(format: Any, key: str) -> str:
    value = format.get(key) if isinstance(format, dict) else None
    if not isinstance(value, str):
        raise GrammarError(f'a part of a structural tag needs a text "{key}"')
    return value


def _list(format: Any, key: str) -> list[Any]:
    value = format.get(key)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
        raise GrammarError(f'a structural tag needs 1 to {MAX_TAGS} "{key}"')
    return value


def _refuse(format: Any, key: str) -> None:
    if format.get(key):
        raise GrammarError(f'"{key}" of a structural tag is not served; leave it out')


def _json(format: Any) -> str:
    """White space between the parts of the JSON is fixed, unless the schema's x-guidance says otherwise."""
    if format.get("style", "json") != "json":
        raise GrammarError('the "style" of a json_schema must be "json"')
    schema = check_schema(format.get("json_schema"))
    return f"%json {json.dumps({'x-guidance': {'whitespace_flexible': False}} | schema)}"


def _regex(pattern: str) -> str:
    check_regex(pattern)
    text = ecma_classes(pattern).replace("\n", "\\n")
    escaped, is_escape = "", False
    for char in text:
        escaped += "\\/" if char == "/" and not is_escape else char
        is_escape = char == "\\" and not is_escape
    return f"/{escaped}/" if escaped else ""
