"""/v1/embeddings: requests to the engine, responses, and refusals."""

import base64

import httpx
import numpy as np
import pytest

from protocol.codec import unpack
from protocol.requests import Embedding, EnginePhase, EngineState, Finish, FinishReason, GenerateRequest, RequestOutputs
from protocol.sampling import Pooling
from services.frontend.openai.embeddings import MAX_OPEN
from services.frontend.openai.schemas.fields import MAX_INPUTS
from tests.integration.frontend.scripted import CONTEXT, TOKENIZER, VOCAB, Frontend, ScriptedScheduler, ended, scripted
from tests.integration.frontend.test_connections import connect, post
from tests.integration.frontend.test_refusals import error_of

PATH, WIDTH = "/v1/embeddings", 8
EMBEDS = EngineState(EnginePhase.READY, max_model_len=CONTEXT, vocab_size=VOCAB, hidden_size=WIDTH)


def states(request: GenerateRequest) -> np.ndarray:
    """Return hidden states that depend on the prompt."""
    ids = unpack(request.token_ids)
    return (np.arange(WIDTH) * 3 + ids[0] + len(ids)).astype(np.float32)


def embedding(request: GenerateRequest) -> list[RequestOutputs]:
    """Send the embedding and the end in two messages; the engine may also send one."""
    values = Embedding(request.number, states(request).tobytes())
    return [RequestOutputs(b"", b"", b"", embeddings=[values]), ended(request.number)]


def at_once(request: GenerateRequest) -> list[RequestOutputs]:
    values = Embedding(request.number, states(request).tobytes())
    return [RequestOutputs(b"", b"", b"", [Finish(request.number, FinishReason.STOP)], embeddings=[values])]


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values)


def numbers_of(response: httpx.Response) -> list[np.ndarray]:
    assert response.status_code == 200, response.text
    return [np.array(item["embedding"], np.float32) for item in response.json()["data"]]


@pytest.mark.parametrize("behaviour", [embedding, at_once])
@pytest.mark.parametrize("form", ["float", "base64"])
def test_official_client_gets_unit_vectors_in_order(
    embedder: Frontend, engine: ScriptedScheduler, form: str, behaviour: object
) -> None:
    engine.script(behaviour)
    texts = ["one", "two words", "three more words"]
    with embedder.client() as client:
        answer = client.embeddings.create(model="demo", input=texts, encoding_format=form)
    ids = [TOKENIZER.encode(text) for text in texts]
    assert [unpack(request.token_ids).tolist() for request in engine.requests] == ids
    assert {request.pooling for request in engine.requests} == {Pooling.LAST}
    assert {(r.params.max_tokens, r.params.temperature) for r in engine.requests} == {(1, 0.0)}
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, request in zip(answer.data, engine.requests, strict=True):
        packed = item.embedding
        if isinstance(packed, str):
            packed = np.frombuffer(base64.b64decode(packed), "<f4")
        np.testing.assert_allclose(np.array(packed), unit(states(request)), atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "demo", "embedding")


@pytest.mark.parametrize(
    ("given", "prompts"), [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]), ("ab", [TOKENIZER.encode("ab")])]
)
def test_every_form_of_input(
    embedder: Frontend, engine: ScriptedScheduler, given: object, prompts: list[list[int]]
) -> None:
    assert len(numbers_of(embedder.post(PATH, {"input": given}))) == len(prompts)
    assert [unpack(request.token_ids).tolist() for request in engine.requests] == prompts


def test_fewer_dimensions_are_cut_then_normalised(embedder: Frontend, engine: ScriptedScheduler) -> None:
    (values,) = numbers_of(embedder.post(PATH, {"input": "x", "dimensions": 3}))
    np.testing.assert_allclose(values, unit(states(engine.request())[:3]), atol=1e-6)
    assert error_of(embedder.post(PATH, {"input": "x", "dimensions": WIDTH + 1}), 400)["param"] == "dimensions"


def test_truncation_keeps_the_last_tokens(embedder: Frontend, engine: ScriptedScheduler) -> None:
    long = [i % VOCAB for i in range(CONTEXT + 500)]
    whole = long[-(CONTEXT - 1) :]
    for keep, kept in ((4, long[-4:]), (-1, whole), (CONTEXT, whole)):
        engine.script(embedding)
        response = embedder.post(PATH, {"input": [long, [1]], "truncate_prompt_tokens": keep})
        assert response.json()["usage"]["prompt_tokens"] == len(kept) + 1
        assert unpack(engine.requests[0].token_ids).tolist() == kept
    engine.script(embedding)
    text = "many words " * 3000
    assert len(numbers_of(embedder.post(PATH, {"input": text, "truncate_prompt_tokens": 5}))) == 1
    assert unpack(engine.request().token_ids).tolist() == TOKENIZER.encode(text)[-5:]


def test_priority_and_salt_reach_the_engine(embedder: Frontend, engine: ScriptedScheduler) -> None:
    body = {"input": "x", "priority": -7, "cache_salt": "mine", "user": "somebody"}
    assert embedder.post(PATH, body).status_code == 200
    assert (engine.request().priority, engine.request().cache_salt) == (-7, "mine")


def test_flag_selects_mean_pooling() -> None:
    with scripted(state=EMBEDS, pooling_type="mean") as (frontend, scheduler):
        scheduler.script(embedding)
        assert frontend.post(PATH, {"input": "x"}).status_code == 200
        assert scheduler.request().pooling is Pooling.MEAN


def test_number_of_open_inputs_is_bounded(embedder: Frontend, engine: ScriptedScheduler) -> None:
    most, finished = 0, 0

    def counting(request: GenerateRequest) -> list[RequestOutputs]:
        nonlocal most, finished
        most = max(most, len(engine.requests) - finished)
        finished += 1
        return at_once(request)

    engine.script(counting)
    given = [[i % VOCAB] for i in range(MAX_INPUTS)]
    values = numbers_of(embedder.post(PATH, {"input": given}))
    assert len(engine.requests) == MAX_INPUTS
    assert most <= MAX_OPEN
    for ids, mine in zip(given, values, strict=True):
        np.testing.assert_allclose(mine, unit(np.arange(WIDTH) * 3 + ids[0] + 1), atol=1e-6)


BAD: list[tuple[dict[str, object], str]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [VOCAB]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [5] * CONTEXT}, "input"),
    ({"input": "word " * 5000}, "input"),
    ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
    ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "x", "dimensions": 0}, "dimensions"),
    ({"input": "x", "stream": True}, "stream"),
    ({"input": "x", "padding": "max_length"}, "padding"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{row[1]}" for i, row in enumerate(BAD)])
def test_bad_field_is_400_and_named(
    embedder: Frontend, engine: ScriptedScheduler, body: dict[str, object], param: str
) -> None:
    assert error_of(embedder.post(PATH, body), 400)["param"] == param
    assert engine.requests == []


def test_backend_without_embeddings_refuses_them(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    error = error_of(frontend.post(PATH, {"input": "x"}), 400)
    assert "no embeddings" in str(error["message"])
    assert scheduler.requests == []


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.REJECTED, 429), (FinishReason.INVALID, 400), (FinishReason.ERROR, 500)]
)
def test_input_that_fails_ends_the_others(
    embedder: Frontend, engine: ScriptedScheduler, reason: FinishReason, status: int
) -> None:
    def second(request: GenerateRequest) -> list[RequestOutputs]:
        return [ended(request.number, reason, message="because of the test")] if len(engine.requests) == 2 else []

    engine.script(second)
    error = error_of(embedder.post(PATH, {"input": ["a", "b", "c"]}), status)
    assert error["message"] == "because of the test"
    engine.wait_aborted(engine.request(0).number)
    engine.wait_aborted(engine.request(2).number)


def test_embedding_that_is_not_finite_is_an_error(embedder: Frontend, engine: ScriptedScheduler) -> None:
    def script(number: float) -> None:
        values = np.full(WIDTH, number, np.float32).tobytes()
        engine.script(
            lambda r: [RequestOutputs(b"", b"", b"", embeddings=[Embedding(r.number, values)]), ended(r.number)]
        )

    for number in (np.nan, np.inf):
        script(number)
        error_of(embedder.post(PATH, {"input": "x"}), 500)
    engine.script(lambda r: [ended(r.number)])
    error_of(embedder.post(PATH, {"input": "x"}), 500)
    script(0.0)
    assert numbers_of(embedder.post(PATH, {"input": "x"}))[0].tolist() == [0.0] * WIDTH


def test_a_client_that_leaves_aborts_its_inputs(embedder: Frontend, engine: ScriptedScheduler) -> None:
    engine.script(lambda _: [])
    with connect(embedder) as connection:
        post(connection, {"input": ["a", "b"]}, PATH)
        numbers = [engine.request(index).number for index in range(2)]
    for number in numbers:
        engine.wait_aborted(number)
