"""Grammars made to exhaust the compiler. Each is refused, and the next request is served."""

import json
import random
import threading

import pytest

from protocol.sampling import MAX_GRAMMAR_CHARS, GrammarKind, StructuredOutputParams
from services.scheduler.grammar.limits import MAX_ALTERNATIVES, MAX_OPTIONAL_PROPERTIES, MAX_ROW_ITEMS
from services.scheduler.grammar.trial.measure import TrialVerdict
from services.scheduler.grammar.trial.process import TrialProcess
from tests.unit.scheduler.grammar.support import CompilerClient, matches, wait


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def properties(number: int, required: bool = False) -> str:
    names = [f"p{i}" for i in range(number)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return json.dumps(schema | ({"required": names} if required else {}))


def crossed(number: int) -> str:
    """Each pattern alone is cheap; the automaton of all of them together is exponential."""
    parts = [{"type": "string", "pattern": f"^(.*{chr(97 + i)}){{10}}$"} for i in range(number)]
    return json.dumps({"allOf": parts})


def doubled(levels: int) -> str:
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {f"d{levels}": {"type": "null"}}})


def multiplied(levels: int) -> str:
    parts = [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]} for i in range(levels)]
    return json.dumps({"allOf": parts})


JSON, REGEX, GRAMMAR, CHOICE = (GrammarKind.JSON, GrammarKind.REGEX, GrammarKind.GRAMMAR, GrammarKind.CHOICE)
BOMBS = {
    "repeated repetition": (REGEX, "(a{1000}){1000}"),
    "repeated repetition behind a harmless part": (REGEX, "[a-z]+-(a{1000}){1000}"),
    "four levels of repetition": (REGEX, "(((a{100}){100}){100}){100}"),
    "repetition with a huge count": (REGEX, "a{999999999}"),
    "30,000 parentheses": (REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "30,000 open parentheses": (REGEX, "(" * 30_000),
    "overlapping repetition": (REGEX, r"(\w{1,500}\s?){1,500}"),
    "many long repetitions": (REGEX, "[a-z]{0,1000}" * 60),
    "a pattern in a schema": (JSON, json.dumps({"type": "string", "pattern": "(a{1000}){1000}"})),
    "a pattern for names": (JSON, json.dumps({"patternProperties": {"(a{1000}){1000}": {}}})),
    "a regular expression in a grammar": (GRAMMAR, "start: /(a{1000}){1000}/"),
    "30,000 brackets": (JSON, "[" * 30_000),
    "500 levels of arrays": (JSON, nested(500)),
    "10,000 levels of arrays": (JSON, nested(10_000)),
    "a reference to itself": (JSON, '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "a reference to the whole": (JSON, '{"$ref":"#"}'),
    "a circle of references": (
        JSON,
        '{"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"}]},"b":{"anyOf":[{"$ref":"#/$defs/a"}]}}}',
    ),
    "huge enumeration": (JSON, json.dumps({"enum": list(range(MAX_ALTERNATIVES + 1))})),
    "huge choice": (CHOICE, json.dumps([f"{i}" for i in range(MAX_ALTERNATIVES + 1)])),
    "5,000 optional properties": (JSON, properties(5_000)),
    "a product of alternatives": (JSON, multiplied(10)),
    "crossed patterns": (JSON, crossed(12)),
    "multiples of a prime": (JSON, '{"type":"integer","multipleOf":999983,"minimum":3,"maximum":1e18}'),
    "a huge range of numbers": (JSON, '{"type":"number","minimum":1e-300,"maximum":1e300}'),
    "20,000 brackets in a grammar": (GRAMMAR, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "20,000 brackets in GBNF": (GRAMMAR, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "rules without a finite match": (GRAMMAR, "start: a\na: b\nb: a"),
    "the longest text allowed": (GRAMMAR, "start: " + "x" * (MAX_GRAMMAR_CHARS - 7)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_and_the_next_request_is_served(compiler: CompilerClient, name: str) -> None:
    kind, text = BOMBS[name]
    refusal = compiler.refusal(kind, text)
    assert len(refusal) < 400
    assert matches(compiler.grammar(REGEX, f"next after {len(name)}"), f"next after {len(name)}")


@pytest.mark.parametrize("number", [800, 2_000, MAX_OPTIONAL_PROPERTIES])
def test_an_object_with_many_optional_properties_is_followed_to_its_end(compiler: CompilerClient, number: int) -> None:
    nested = {"type": "object", "properties": {"inner": json.loads(properties(number))}}
    text = f'{{"inner": {{"p1": "a", "p{number // 2}": "b", "p{number - 1}": "c"}}}}'
    assert matches(compiler.grammar(JSON, json.dumps(nested)), text)


def test_too_many_optional_properties_are_refused_with_the_limit(compiler: CompilerClient) -> None:
    """Also where no single object has too many of them: the trial walks into the first object."""
    limit = f"{MAX_OPTIONAL_PROPERTIES:,}"
    assert f"at most {limit} can be served" in compiler.refusal(JSON, properties(MAX_OPTIONAL_PROPERTIES + 1))
    objects = [
        {"type": "object", "properties": {f"{letter}{i}": {"type": "string"} for i in range(1_600)}} for letter in "ab"
    ]
    assert f"at most {MAX_ROW_ITEMS:,} can be served" in compiler.refusal(JSON, json.dumps({"anyOf": objects}))


INFINITE = '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"],"additionalProperties":false}'


@pytest.mark.parametrize(
    "text", [doubled(14), properties(3_000, required=True), INFINITE], ids=["doubling", "properties", "infinite"]
)
def test_large_harmless_grammar_ends_and_the_next_request_is_served(compiler: CompilerClient, text: str) -> None:
    """llguidance may accept or refuse it."""
    compiler.result(JSON, text)
    assert matches(compiler.grammar(REGEX, "served"), "served")


def test_bomb_on_one_thread_does_not_delay_the_other_thread(
    compiler: CompilerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of the bomb ends only after the grammar that was submitted later is compiled."""
    text, release, verdict = "(a{1000}){999}", threading.Event(), TrialProcess.verdict

    def held(process: TrialProcess, params: StructuredOutputParams) -> TrialVerdict:
        if params.text == text:
            release.wait()
        return verdict(process, params)

    monkeypatch.setattr(TrialProcess, "verdict", held)
    bomb = compiler.submit(REGEX, text)
    try:
        served = compiler.grammar(REGEX, "not delayed")
    finally:
        release.set()
    assert matches(served, "not delayed")
    assert isinstance(wait(compiler.inner, bomb)[bomb], str)


def test_random_regular_expressions_never_kill_the_trial_process(compiler: CompilerClient) -> None:
    rng = random.Random(11)
    parts = ["a", "b", ".", r"\w", "[^a]", "(", ")", "|", "*", "+", "?", "{2}", "{1,30}", "{9,}", "^", "$", "\\", "["]
    killed = compiler.inner.counters["killed"]
    for _ in range(150):
        compiler.result(REGEX, "".join(rng.choices(parts, k=rng.randint(1, 30))))
    assert compiler.inner.counters["killed"] == killed
