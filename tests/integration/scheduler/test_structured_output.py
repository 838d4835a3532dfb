"""Structured output through real services: answers validate, and no request waits for another's grammar."""

import json
import os
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from protocol.requests import FinishReason, RequestOutputs
from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from services.scheduler.grammar.trial.child import FAILPOINT
from tests.integration.scheduler.engine import engine
from tests.integration.scheduler.schemas import SchemaGenerator
from tests.integration.scheduler.step_trace import in_flight, read_steps

EOS = (2,)
PROMPT = [1, 100, 200, 300]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
SIM: dict[str, object] = {"backend": "sim", "sim_step_ms": 0.0}
BLANK = [token for token in range(TOKENIZER.get_vocab_size()) if TOKENIZER.decode([token]).isspace()]
COMPACT = {False: (), True: tuple((token, -100.0) for token in BLANK)}
"""Logit biases for and against whitespace."""
SCHEMAS = 1000 if os.environ.get("RUNAHEAD_SOAK") else 100
HEX = StructuredOutputParams(GrammarKind.REGEX, "[0-9a-f]{40}")


def text_of(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=True))


def schema_params(schema: object) -> StructuredOutputParams:
    return StructuredOutputParams(GrammarKind.JSON, json.dumps(schema))


def test_random_schemas_and_every_finished_answer_validates(tmp_path: Path) -> None:
    generator, num_requests, num_open = SchemaGenerator(4), SCHEMAS, 128
    schemas = [generator.schema() for _ in range(num_requests)]
    scheduler = {"max_model_len": 1024, "max_num_seqs": num_open}
    with engine(tmp_path, scheduler, SIM) as running:
        client = running.connect()
        sent = 0
        while len(client.finished) < num_requests:
            while sent < num_requests and sent - len(client.finished) < num_open:
                params = SamplingParams(600, seed=sent, eos_token_ids=EOS, logit_bias=COMPACT[sent % 4 > 0])
                client.generate(sent, PROMPT, params, structured=schema_params(schemas[sent]))
                sent += 1
            client.receive()
        assert set(running.stop()) == {0}
    reasons = [client.finished[number].reason for number in range(num_requests)]
    assert set(reasons) <= {FinishReason.STOP, FinishReason.LENGTH}, [
        (client.finished[n].message, schemas[n]) for n in range(num_requests) if client.finished[n].message
    ]
    finished = [number for number in range(num_requests) if reasons[number] is FinishReason.STOP]
    assert len(finished) > 0.9 * num_requests
    for number in finished:
        answer = json.loads(text_of(client.tokens[number]))
        jsonschema.validate(answer, schemas[number], cls=jsonschema.Draft202012Validator)


def test_a_request_alone_gets_a_grammar_that_is_compiled_already(tmp_path: Path) -> None:
    """Nothing wakes the loop: such a grammar is there at once."""
    with engine(tmp_path, {}, SIM) as running:
        client = running.connect()
        for number in range(2):
            client.generate(number, PROMPT, SamplingParams(4, seed=number), structured=HEX)
            client.wait_finished(number)
        assert set(running.stop()) == {0}


@pytest.mark.parametrize("policy", ["chunked", "phased"])
def test_a_slow_compilation_delays_no_other_token_by_more_than_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The first structured request after the start, while others decode."""
    monkeypatch.setenv(FAILPOINT, "1")
    trace, neighbours, newcomer = tmp_path / "trace", range(8), 8
    scheduler = {"batching_policy": policy, "max_model_len": 2048, "step_trace": str(trace)}
    with engine(tmp_path, scheduler, {**SIM, "sim_step_ms": 5.0}) as running:
        client = running.connect()
        for number in neighbours:
            client.generate(number, PROMPT, SamplingParams(2000, seed=number))
        while not all(client.tokens[number] for number in neighbours):
            client.receive()
        client.generate(newcomer, PROMPT, SamplingParams(60, seed=9, eos_token_ids=EOS), structured=HEX)
        missed, waiting = dict.fromkeys(neighbours, 0), 0
        while newcomer not in client.finished:
            message = client.receive()
            if not isinstance(message, RequestOutputs) or not message.numbers:
                continue
            waiting += not client.tokens[newcomer]
            delivered = set(np.frombuffer(message.numbers, np.uint32).tolist())
            running_on = [number for number in neighbours if number not in client.finished]
            missed = {number: 0 if number in delivered else missed[number] + 1 for number in running_on}
            assert max(missed.values(), default=0) <= 1, "another request's next token is two steps late"
        assert waiting > 10, "the compilation was not slow"
        assert re.fullmatch("[0-9a-f]{40}", text_of(client.tokens[newcomer]))
        client.abort(*neighbours)
        assert set(running.stop()) == {0}
    _assert_steps_went_on(trace, waiting)


def _assert_steps_went_on(trace: Path, least: int) -> None:
    """While the new request's grammar was compiled, plans and results alternated, and none waited for it."""
    assert set(in_flight(trace)) == {0, 1, 2}
    assert len(read_steps(trace)) > least


def test_without_a_tokenizer_it_is_refused_by_name_and_everything_else_is_served(tmp_path: Path) -> None:
    with engine(tmp_path, {"max_model_len": 1024, "tokenizer": str(tmp_path)}, SIM) as running:
        client = running.connect()
        client.generate(0, PROMPT, SamplingParams(8), structured=HEX)
        client.generate(1, PROMPT, SamplingParams(8))
        client.wait_finished(0, 1)
        assert client.finished[0].reason is FinishReason.INVALID
        assert "structured output is not served" in client.finished[0].message
        assert client.finished[1].reason is FinishReason.LENGTH
        assert set(running.stop()) == {0}


def test_a_grammar_begins_after_its_marker_and_ends_before_what_ignores_its_end(tmp_path: Path) -> None:
    """The marker is found in the output; a bias makes it likely."""
    marker = 77
    with engine(tmp_path, {"max_model_len": 1024}, SIM) as running:
        client = running.connect()
        thinks = SamplingParams(400, seed=5, eos_token_ids=EOS, logit_bias=((marker, 4.0), (EOS[0], -100.0)))
        after = StructuredOutputParams(GrammarKind.CHOICE, '["yes", "no"]', begins_after=(marker,))
        client.generate(0, PROMPT, thinks, structured=after)
        ignores = SamplingParams(40, seed=6)
        client.generate(1, PROMPT, ignores, structured=StructuredOutputParams(GrammarKind.CHOICE, '["yes", "no"]'))
        client.wait_finished(0, 1)
        assert set(running.stop()) == {0}
    tokens = client.tokens[0]
    assert client.finished[0].reason is FinishReason.STOP
    assert text_of(tokens[tokens.index(marker) + 1 :]) in ("yes", "no")
    assert client.finished[1].reason is FinishReason.LENGTH
    end = client.tokens[1].index(EOS[0])
    assert text_of(client.tokens[1][:end]) in ("yes", "no")
    assert len(client.tokens[1]) == 40
