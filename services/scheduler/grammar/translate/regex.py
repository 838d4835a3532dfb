"""Depth and size of regular expressions, checked before llguidance reads them."""

import re

from services.scheduler.grammar.errors import GrammarError, too_complex
from services.scheduler.grammar.limits import MAX_DEPTH, MAX_REGEX_ATOMS

_COUNT = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/((?:\\.|[^/\\\n])+)/')


def check_regex(pattern: str, what: str = "regular expression") -> None:
    """Check the nesting, and the length with counted repetitions written out. Raises: GrammarError"""
    sizes, last, position = [0], 0, 0
    while position < len(pattern):
        char = pattern[position]
        repeat = _COUNT.match(pattern, position) if char == "{" else None
        if char == "(":
            sizes.append(0)
            if len(sizes) > MAX_DEPTH:
                raise GrammarError(f"the {what} is nested more than {MAX_DEPTH} levels deep")
            last, position = 0, position + 1
            continue
        if char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif repeat is not None:
            times = max(int(repeat[3] or repeat[1] or 0), 1)
            sizes[-1] += last * (times - 1)
            last *= times
            position = repeat.end() - 1
        elif char not in "*+?|":
            sizes[-1] += 1
            last = 1
            found = _CLASS.match(pattern, position) if char == "[" else None
            position = found.end() - 1 if found else position + (char == "\\")
        position += 1
        if sum(sizes) > MAX_REGEX_ATOMS:
            raise too_complex(what)


def check_lark(grammar: str) -> None:
    """Check the regular expressions in a Lark or GBNF grammar, and the depth of its brackets. Raises: GrammarError"""
    rest: list[str] = []
    end = 0
    for literal in _LITERALS.finditer(grammar):
        rest.append(grammar[end : literal.start()])
        end = literal.end()
        if literal[1] is not None:
            check_regex(literal[1], "regular expression in the grammar")
    rest.append(grammar[end:])
    depth = 0
    for char in "".join(rest):
        depth += (char in "([{") - (char in ")]}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"the grammar is nested more than {MAX_DEPTH} levels deep")
