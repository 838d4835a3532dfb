"""Log-probabilities in the formats of completions and chat, of output and prompt, whole and streamed."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.codec import pack, unpack
from protocol.logprobs import Logprobs
from protocol.requests import GenerateRequest, RequestOutputs
from tests.integration.frontend.scripted import TOKENIZER, Behaviour, Frontend, ScriptedScheduler, ended, ids_of, tokens
from tests.integration.frontend.streams import events

TEXT = "Grüße, 世界! 👩‍👩‍👧 ok"
CHAT = [{"role": "user", "content": "x"}]


def value(position: int, entry: int) -> float:
    """Return the log-probability of `entry` at `position`; entry 0 is the token itself, 1 the most likely."""
    return -position / 8 - entry


def rows(number: int, known: list[tuple[int, list[int]]], rank: int = 7, shift: float = 0.0) -> Logprobs:
    """
    Args:
        known: position, and token with the most likely tokens, of each row.
    """
    values = [value(position, place) + shift for position, ids in known for place in range(len(ids))]
    return Logprobs(
        pack([number] * len(known)),
        pack([position for position, _ in known]),
        pack([len(ids) for _, ids in known]),
        pack([rank] * len(known)),
        pack([token for _, ids in known for token in ids]),
        pack_floats(values),
    )


def pack_floats(values: list[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


def of_prompt(request: GenerateRequest, rank: int = 7, shift: float = 0.0) -> RequestOutputs:
    """Return rows for all positions but the first; the most likely tokens are 300, 301 and so on."""
    ids = unpack(request.token_ids).tolist()
    top = [300 + i for i in range(request.params.prompt_logprobs or 0)]
    known = [(position, [ids[position], *top]) for position in range(1, len(ids))]
    return RequestOutputs(b"", b"", b"", logprobs=rows(request.number, known, rank, shift))


def step(request: GenerateRequest, index: int, token: int) -> RequestOutputs:
    """Return a token with its log-probabilities."""
    top = [300 + i for i in range(request.params.logprobs or 0)]
    known = [(request.num_prompt_tokens + index, [token, *top])]
    return RequestOutputs(pack([request.number]), pack([index]), pack([token]), logprobs=rows(request.number, known))


def answering(text: str, **end: object) -> Behaviour:
    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        asked = [of_prompt(request)] if request.params.prompt_logprobs is not None else []
        steps = [step(request, index, token) for index, token in enumerate(ids_of(text))]
        return [*asked, *steps, ended(request.number, **end)]

    return behave


def test_completion_has_columns_whole_and_streamed(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering(TEXT))
    with frontend.client() as client:
        whole = client.completions.create(model="demo", prompt=[5, 6, 7], logprobs=2).choices[0]
        stream = client.completions.create(model="demo", prompt=[5, 6, 7], logprobs=2, stream=True)
        pieces = [chunk.choices[0] for chunk in stream]
    found, ids = whole.logprobs, ids_of(TEXT)
    assert scheduler.request().params.logprobs == 2
    assert whole.text == TEXT
    assert found.token_logprobs == [value(3 + i, 0) for i in range(len(ids))]
    assert [sorted(top.values()) for top in found.top_logprobs] == [
        sorted({value(3 + i, place) for place in range(3)}) for i in range(len(ids))
    ]
    assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    shown = [TEXT[a:b] for a, b in zip(found.text_offset, [*found.text_offset[1:], None], strict=True)]
    assert "".join(shown) == TEXT
    assert all(token == text for token, text in zip(found.tokens, shown, strict=True) if "\ufffd" not in token)
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for p in pieces if p.logprobs for entry in getattr(p.logprobs, column)]
        assert joined == getattr(found, column)
    assert all(piece.logprobs is not None for piece in pieces if piece.text)


def test_chat_has_bytes_that_join_to_the_text(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering(TEXT))
    asked = {"model": "demo", "messages": CHAT, "logprobs": True, "top_logprobs": 3}
    with frontend.client() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0] for chunk in stream]
        plain = client.chat.completions.create(model="demo", messages=CHAT, logprobs=True).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole.message.content == TEXT
    assert [len(entry.top_logprobs) for entry in content] == [3] * len(ids_of(TEXT))
    likely = [TOKENIZER.decode([token], show_special=True) for token in (300, 301, 302)]
    assert [entry.token for entry in content[0].top_logprobs] == likely
    assert [e for piece in pieces if piece.logprobs for e in piece.logprobs.content] == content
    assert all(piece.logprobs is not None for piece in pieces if piece.delta.content)
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[]] * len(content)


def test_minus_infinity_becomes_a_number(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        known = Logprobs(
            pack([request.number]),
            pack([request.num_prompt_tokens]),
            pack([2]),
            pack([1]),
            pack([400, 401]),
            pack_floats([-float("inf"), -0.5]),
        )
        said = RequestOutputs(pack([request.number]), pack([0]), pack([400]), logprobs=known)
        return [of_prompt(request, shift=-float("inf")), said, ended(request.number)]

    scheduler.script(behave)
    body = {"prompt": [5, 6, 7], "logprobs": 1, "prompt_logprobs": 0}
    answer = frontend.post("/v1/completions", body).json()["choices"][0]
    assert [entry["logprob"] for at in answer["prompt_logprobs"][1:] for entry in at.values()] == [-9999.0] * 2
    assert answer["logprobs"]["token_logprobs"] == [-9999.0]
    assert sorted(answer["logprobs"]["top_logprobs"][0].values()) == [-9999.0, -0.5]
    chat = frontend.post("/v1/chat/completions", {"messages": CHAT, "logprobs": True}).json()["choices"][0]
    assert [entry["logprob"] for entry in chat["logprobs"]["content"]] == [-9999.0]


def test_tokens_can_be_named_by_their_ids(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("ab"))
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    found = frontend.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    names = [f"token_id:{token}" for token in ids_of("ab")]
    assert found["tokens"] == names
    assert [set(top) for top in found["top_logprobs"]] == [{name, "token_id:300"} for name in names]


def test_prompt_logprobs_are_keyed_by_position_and_the_first_one_wins(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    """After a preemption positions arrive again, perhaps with other values."""

    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        if request.params.prompt_logprobs is None:
            return [tokens(request.number, ids_of("b")), ended(request.number)]
        again = of_prompt(request, rank=9, shift=-1.0)
        return [of_prompt(request), again, tokens(request.number, ids_of("a")), ended(request.number)]

    scheduler.script(behave)
    asked = {"prompt": [[5, 6, 400], [8, 9]], "n": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    choices = frontend.post("/v1/completions", asked).json()["choices"]
    first = choices[0]["prompt_logprobs"]
    assert first == [
        None,
        {
            "6": {"logprob": value(1, 0), "rank": 7, "decoded_token": TOKENIZER.decode([6], show_special=True)},
            "300": {"logprob": value(1, 1), "rank": 1, "decoded_token": TOKENIZER.decode([300], show_special=True)},
        },
        {
            "400": {"logprob": value(2, 0), "rank": 7, "decoded_token": TOKENIZER.decode([400], show_special=True)},
            "300": {"logprob": value(2, 1), "rank": 1, "decoded_token": TOKENIZER.decode([300], show_special=True)},
        },
    ]
    assert choices[1]["prompt_logprobs"] == first
    assert choices[2]["prompt_logprobs"] == choices[3]["prompt_logprobs"]
    assert list(choices[2]["prompt_logprobs"][1]) == ["9", "300"]
    # computed once per prompt, so that the other choices may use the prefix cache
    assert [request.params.prompt_logprobs for request in scheduler.requests] == [1, None, 1, None]
    chat = frontend.post("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in chat["choices"][0]


def test_echo_shows_the_prompt_with_its_log_probabilities(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool
) -> None:
    scheduler.script(answering(" there"))
    prompt = "Grüße, 世界"
    ids, said = TOKENIZER.encode(prompt), ids_of(" there")
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    response = frontend.post("/v1/completions", body)
    choices = [e["choices"][0] for e in events(response)] if stream else response.json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == prompt + " there"
    columns: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name, column in columns.items():
            column += choice["logprobs"][name] if choice["logprobs"] else []
    assert columns["token_logprobs"] == [value(i, 0) for i in range(1, len(ids) + len(said))]
    assert columns["tokens"][0] == TOKENIZER.decode(ids[1:2], show_special=True)  # without ids[0], <|bos|>
    offsets = columns["text_offset"]
    assert offsets[len(ids) - 1] == len(prompt)
    assert offsets == sorted(offsets)
    assert text[offsets[len(ids) - 1] :] == " there"


def test_echo_of_token_ids_has_an_entry_for_each_of_them(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("x"))
    ids = TOKENIZER.encode("Hello")
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    logprobs = frontend.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [TOKENIZER.decode([token], show_special=True) for token in ids]
    assert logprobs["token_logprobs"][0] is None


def test_echo_waits_for_the_logprobs_of_the_prompt_from_another_choice(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    """The second choice ends before the prompt's log-probabilities arrive, which only the first one requests."""

    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        if len(scheduler.requests) < 2:
            return []
        first, second = scheduler.requests
        early = [step(second, 0, ids_of("b")[0]), ended(second.number)]
        return [*early, of_prompt(first), step(first, 0, ids_of("a")[0]), ended(first.number)]

    for stream in (True, False):
        scheduler.script(behave)
        body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "n": 2, "stream": stream}
        response = frontend.post("/v1/completions", body)
        choices = [e["choices"][0] for e in events(response)] if stream else response.json()["choices"]
        prompt = TOKENIZER.decode([5, 6, 7])
        for index, letter in enumerate("ab"):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == prompt + letter
            entries = [e for c in own if c["logprobs"] for e in c["logprobs"]["token_logprobs"]]
            assert entries == [None, *(value(i, 0) for i in (1, 2, 3))]


def test_echo_without_output_returns_the_prompt(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("never"))
    answer = frontend.post("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 0, "logprobs": 1}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"] - 1  # without <|bos|>
    assert answer["usage"]["completion_tokens"] == 0
    assert scheduler.request().params.max_tokens == 1
    given = {"prompt": "Hello<|user|>", "echo": True, "max_tokens": 0, "truncate_prompt_tokens": -1}  # cuts nothing off
    plain = frontend.post("/v1/completions", given).json()
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (given["prompt"], None)


@pytest.mark.parametrize(("include", "echo"), [(False, False), (True, False), (False, True)])
def test_logprobs_of_tokens_cut_off_by_a_stop_string_are_dropped(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool, include: bool, echo: bool
) -> None:
    scheduler.script(answering("one STOP two"))
    body = {
        "prompt": [5, 6, 7], "stop": "STOP", "logprobs": 0, "stream": stream, "include_stop_str_in_output": include,
        "echo": echo,
    }  # fmt: skip
    response = frontend.post("/v1/completions", body)
    choices = [e["choices"][0] for e in events(response)] if stream else response.json()["choices"]
    shown = "one STOP" if include else "one "
    asked = [5, 6, 7] if echo else []
    assert "".join(choice["text"] for choice in choices) == TOKENIZER.decode(asked) + shown
    names = [name for c in choices if c["logprobs"] for name in c["logprobs"]["tokens"]]
    kept, text = [], ""
    for token in ids_of("one STOP two"):
        if len(text) < len(shown):
            kept.append(TOKENIZER.decode([token], show_special=True))
        text += TOKENIZER.decode([token], show_special=True)
    assert names == [TOKENIZER.decode([token], show_special=True) for token in asked] + kept


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_log_probability_that_is_no_number_fails_its_request_alone(
    frontend: Frontend, scheduler: ScriptedScheduler, field: str
) -> None:
    def behave(request: GenerateRequest) -> list[RequestOutputs]:
        at, token = (1, []) if field == "prompt_logprobs" else (2, [6])
        undefined = rows(request.number, [(at, [6])], shift=float("nan"))
        return [replace(tokens(request.number, token), logprobs=undefined), ended(request.number)]

    scheduler.script(behave)
    refused = frontend.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, field: 1})
    assert (refused.status_code, "no number" in refused.text) == (500, True)
    scheduler.script(answering("ok"))
    assert frontend.post("/v1/completions", {"prompt": [5, 6], "logprobs": 1}).status_code == 200


def test_a_token_without_its_log_probability_is_an_error(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(lambda request: [tokens(request.number, ids_of("a")), ended(request.number)])
    refused = frontend.post("/v1/completions", {"prompt": "x", "logprobs": 1})
    assert (refused.status_code, "log-prob" in refused.text) == (500, True)
    assert json.loads(refused.content)["error"]["type"] == "internal_server_error"
