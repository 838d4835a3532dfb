"""/tokenize, /detokenize and /version."""

from importlib import metadata

import httpx
import pytest

from protocol.codec import unpack
from protocol.requests import EnginePhase, EngineState
from services.frontend.openai.prompts.encoder import MAX_CHARS
from services.frontend.openai.tokenize import MAX_IDS
from services.frontend.text.tokenizer import MANY
from tests.integration.frontend.scripted import (
    CONTEXT,
    TOKENIZER,
    VOCAB,
    Frontend,
    ScriptedScheduler,
    answering,
    scripted,
    wait_until,
)

TEXT = "Grüße, 世界! <|user|> ok"


def test_text_to_tokens_and_back(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    answer = frontend.post("/tokenize", {"model": "demo", "prompt": TEXT, "max_tokens": 5, "temperature": 0}).json()
    ids = TOKENIZER.encode(TEXT)
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    bare = {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
    answer = frontend.post("/tokenize", bare).json()
    assert answer["tokens"] == TOKENIZER.encode(TEXT, add_special_tokens=False) == ids[1:]
    assert answer["token_strs"] == [TOKENIZER.name(token) for token in ids[1:]]
    assert frontend.post("/detokenize", {"tokens": ids[1:]}).json() == {"prompt": TEXT}
    assert frontend.post("/detokenize", {"tokens": ids}).json() == {"prompt": f"<|bos|>{TEXT}"}
    assert frontend.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
def test_tokens_of_a_conversation_are_those_of_a_chat_request(
    frontend: Frontend, scheduler: ScriptedScheduler, more: dict[str, object]
) -> None:
    scheduler.script(answering("x"))
    body = {"messages": [{"role": "user", "content": TEXT}], **more}
    frontend.post("/v1/chat/completions", body)
    answer = frontend.post("/tokenize", body).json()
    assert answer["tokens"] == unpack(scheduler.request().token_ids).tolist()
    assert answer["count"] == len(answer["tokens"])


def test_many_tokens_and_back(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    """More tokens than are decoded one text at a time."""
    text = "a b c d " * 4096
    ids = frontend.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert len(ids) > MANY
    assert frontend.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


@pytest.mark.parametrize(("path", "more"), [("/tokenize", {}), ("/v1/completions", {"truncate_prompt_tokens": 5})])
def test_a_text_that_would_fill_the_memory_is_not_tokenized(
    frontend: Frontend, scheduler: ScriptedScheduler, path: str, more: dict[str, object]
) -> None:
    answer = frontend.post(path, {"prompt": "a" * (MAX_CHARS + 1), **more})
    assert answer.status_code == 400
    assert f"at most {MAX_CHARS} are tokenized" in answer.json()["error"]["message"]


def test_invalid_bodies_are_refused_by_name(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    cases = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": 5}, "messages"),
        ("/tokenize", {"prompt": "x", "best_of": 5}, "best_of"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
         "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [5] * (MAX_IDS + 1)}, "tokens"),
    ]  # fmt: skip
    for path, body, param in cases:
        response = frontend.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    unknown = frontend.post("/tokenize", {"prompt": "x", "model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_endpoints_work_without_an_engine() -> None:
    with scripted(state=EngineState(EnginePhase.LOADING), served_model_name=["demo"]) as (frontend, _):
        wait_until(lambda: httpx.get(f"{frontend.url}/livez").status_code == 200, "it answers")
        answer = frontend.post("/tokenize", {"prompt": "Hi"}).json()
        assert answer["tokens"] == TOKENIZER.encode("Hi")
        assert answer["max_model_len"] is None
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        image: dict[str, object] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for path, part in (("/tokenize", image), ("/v1/messages/count_tokens", {"type": "image", "source": source})):
            refused = frontend.post(path, {"messages": [{"role": "user", "content": [part]}]})
            assert refused.status_code == 503, "whether the model has images is not known"
        assert httpx.get(f"{frontend.url}/version").json() == {"version": metadata.version("runahead-engine")}
