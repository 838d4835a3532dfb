"""Depth and size of regular expressions, checked before llguidance reads them, and their translation.

Patterns of a JSON schema are those of ECMA-262, in which `\\d` and `\\w` are ASCII. llguidance reads Rust's dialect, in
which they are all digits and letters of Unicode.
"""

import re

from services.scheduler.grammar.errors import GrammarError, too_complex
from services.scheduler.grammar.limits import MAX_DEPTH, MAX_REGEX_ATOMS

_COUNT = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/((?:\\.|[^/\\\n])+)/')
_SPACE = r"\t\n\x0b\x0c\r\x20\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
"""WhiteSpace and LineTerminator of ECMA-262."""
_CLASSES = {"d": "0-9", "w": "0-9A-Z_a-z", "s": _SPACE}
_CLASS_ESCAPES = {rf"\{name}": f"[{members}]" for name, members in _CLASSES.items()}
_CLASS_ESCAPES |= {rf"\{name.upper()}": f"[^{members}]" for name, members in _CLASSES.items()}
_TOKEN = re.compile(r"\\.|\[\^?(?:-+|\])?|.", re.DOTALL)
"""An escape, the beginning of a class (a bracket that comes first does not end it), or one character."""


def ecma_classes(pattern: str) -> str:
    r"""Return a pattern with the sets of ECMA-262 in place of `\d`, `\w`, `\s` and their negations.

    A hyphen beside such a set in a class stands for itself, as in ECMA-262.
    """
    tokens, depth = _TOKEN.findall(pattern), 0
    translated = [_CLASS_ESCAPES.get(token, token) for token in tokens]
    for i, token in enumerate(tokens):
        if token[0] == "[":
            depth += 1
        elif token == "]" and depth:
            depth -= 1
        elif token == "-" and depth and "-" not in (tokens[i - 1], *tokens[i + 1 : i + 2]):
            neighbours = {tokens[i - 1], *tokens[i + 1 : i + 2]}
            translated[i] = r"\-" if neighbours & _CLASS_ESCAPES.keys() else token
    return "".join(translated)


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
