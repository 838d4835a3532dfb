r"""`\d`, `\w` and `\s` mean the sets of ECMA-262 in patterns of JSON schemas and in regular expressions."""

import json
import unicodedata

import pytest

from protocol.sampling import GrammarKind
from services.scheduler.grammar.translate.regex import ecma_classes
from tests.unit.scheduler.grammar.support import CompilerClient, matches

DIGITS, LETTERS = "0123456789", "azAZ"
FOREIGN_DIGITS = "\u0663\u096a\U0001d7d8\U00010d40"
"""Arabic-Indic, Devanagari, mathematical, and one of Unicode 16 (Garay)."""
FOREIGN_LETTERS = "\u00e9\u03b1\u4e2d\u017f"
SPACES = "\t\n\x0b\x0c\r \u00a0\u1680\u2000\u2005\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
NO_SPACES = "\x1c\x85\u180e\u200b"
"""Python, Unicode or older standards call some of them white space."""
SIGNS = "-]\\^_.:x!"


@pytest.mark.parametrize(
    ("pattern", "members"),
    [
        (r"\d", DIGITS),
        (r"\w", DIGITS + LETTERS + "_x"),
        (r"\s", SPACES),
        (r"[\d\-]", DIGITS + "-"),
        (r"[\d-]", DIGITS + "-"),
        (r"[-\d]", DIGITS + "-"),
        (r"[\d-z]", DIGITS + "-z"),
        (r"[!-\d]", DIGITS + "!-"),
        (r"[]\d]", DIGITS + "]"),
        (r"[-\]\\]", "-]\\"),
        (r"[a-cw-y]", "ax"),
        (r"[\w.:]", DIGITS + LETTERS + "_x.:"),
        (r"[\d\s]", DIGITS + SPACES),
        (r"\[|\\|\d", DIGITS + "\\"),
    ],
)
def test_a_class_has_exactly_its_members(compiler: CompilerClient, pattern: str, members: str) -> None:
    everything = DIGITS + LETTERS + FOREIGN_DIGITS + FOREIGN_LETTERS + SPACES + NO_SPACES + SIGNS
    found = [char for char in everything if matches(compiler.grammar(GrammarKind.REGEX, pattern), char)]
    assert set(found) == set(members)


@pytest.mark.parametrize(
    ("pattern", "others"),
    [
        (r"\D", DIGITS),
        (r"[^\d]", DIGITS),
        (r"\W", DIGITS + LETTERS + "_x"),
        (r"\S", SPACES),
        (r"[^\s]", SPACES),
        (r"[\S]", SPACES),
        (r"[^\s\d]", SPACES + DIGITS),
        (r"[^\S]", DIGITS + LETTERS + FOREIGN_DIGITS + FOREIGN_LETTERS + NO_SPACES + SIGNS),
    ],
)
def test_a_negated_class_has_all_other_characters(compiler: CompilerClient, pattern: str, others: str) -> None:
    everything = DIGITS + LETTERS + FOREIGN_DIGITS + FOREIGN_LETTERS + SPACES + NO_SPACES + SIGNS
    missed = [char for char in everything if not matches(compiler.grammar(GrammarKind.REGEX, pattern), char)]
    assert set(missed) == set(others)


def test_the_foreign_digits_are_digits_elsewhere() -> None:
    known = [char for char in FOREIGN_DIGITS if unicodedata.category(char) == "Nd"]
    assert len(known) >= len(FOREIGN_DIGITS) - 1  # Unicode 16 is newer than some versions of Python


@pytest.mark.parametrize("digit", ["5", *FOREIGN_DIGITS])
def test_patterns_of_a_schema(compiler: CompilerClient, digit: str) -> None:
    """Values, names of properties, and patterns below a property that is called as a keyword is."""
    pattern = {"type": "string", "pattern": r"^\d$"}
    schemas = {
        json.dumps(pattern): f'"{digit}"',
        json.dumps({"anyOf": [pattern, {"type": "null"}]}): f'"{digit}"',
        json.dumps({"type": "object", "properties": {"enum": pattern}, "required": ["enum"]}): f'{{"enum":"{digit}"}}',
        json.dumps(
            {"type": "object", "patternProperties": {r"^\d$": {"type": "null"}}, "additionalProperties": False}
        ): f'{{"{digit}":null}}',
    }
    for schema, text in schemas.items():
        assert matches(compiler.grammar(GrammarKind.JSON, schema), text) is digit.isascii(), schema


def test_data_in_a_schema_is_no_pattern(compiler: CompilerClient) -> None:
    schema = json.dumps({"const": {"pattern": r"\d"}})
    assert matches(compiler.grammar(GrammarKind.JSON, schema), json.dumps({"pattern": r"\d"}))


@pytest.mark.parametrize("pattern", [r"\\d", r"[\\d]", r"a{2}[b-d]?(e|f)\.", r"\p{Lu}", "[[:alpha:]]"])
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert ecma_classes(pattern) == pattern
