"""Structured output through real services: answers parse and validate, and nobody waits for another's grammar."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from protocol.sampling import GrammarKind, SamplingParams, StructuredOutputParams
from services.checkpoint import DEMO_MODEL
from tests.integration.scheduler.engine import EngineClient, engine

EOS = (2,)
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
SIM = {"backend": "sim", "sim_step_ms": 0.0}


def text_of(client: EngineClient, number: int) -> str:
    return str(TOKENIZER.decode(client.tokens[number], skip_special_tokens=True))


def schema_params(schema: object) -> StructuredOutputParams:
    return StructuredOutputParams(GrammarKind.JSON, json.dumps(schema))


def test_answers_are_what_was_asked_for(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    with engine(tmp_path, {"max_model_len": 2048}, SIM) as running:
        client = EngineClient(running.client_endpoint)
        client.wait_ready()
        params = SamplingParams(512, eos_token_ids=EOS)
        client.generate(0, [1, 5, 9], params, structured=schema_params(schema))
        client.generate(
            1, [1, 5, 9], params, structured=StructuredOutputParams(GrammarKind.REGEX, "[a-f]{3}-[0-9]{2}")
        )
        client.generate(
            2, [1, 5, 9], params, structured=StructuredOutputParams(GrammarKind.CHOICE, '["yes", "no"]')
        )
        client.wait_finished(0, 1, 2)
        client.close()
        assert set(running.stop()) == {0}
