"""Each parameter of a body: the request to the engine, and its effect on the answer."""

import json
from contextlib import closing

import pytest
from msgspec.structs import replace

from protocol.codec import unpack
from protocol.requests import FinishReason, GenerateRequest, RequestOutputs
from protocol.sampling import GrammarKind, StructuredOutputParams
from tests.integration.frontend.scripted import (
    CONTEXT,
    READY,
    TOKENIZER,
    VOCAB,
    Frontend,
    ScriptedScheduler,
    answering,
    ended,
    endpoint,
    ids_of,
    one_by_one,
    prompt_of,
    scripted,
)
from tests.integration.frontend.streams import events
from tests.waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_choices_of_n_are_in_order_with_distinct_seeds_and_each_prompt_counts_once(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    def backwards(request: GenerateRequest) -> list[RequestOutputs]:
        if len(scheduler.requests) < 6:
            return []
        each = [one_by_one(r, ids_of(f"{i}"), num_cached_tokens=i) for i, r in enumerate(scheduler.requests)]
        return [output for outputs in reversed(each) for output in outputs]

    scheduler.script(backwards)
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 3, "seed": 2**64 - 2}
    answer = frontend.post(COMPLETIONS, body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, f"{i}") for i in range(6)]
    seeds = [request.params.seed for request in scheduler.requests]
    assert seeds == [2**64 - 2, 2**64 - 1, 0] * 2
    assert [len(unpack(r.token_ids)) for r in scheduler.requests] == [2, 2, 2, 3, 3, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0 + 3}


def test_stop_string_and_stop_token_are_shown_on_request(
    frontend: Frontend, scheduler: ScriptedScheduler, stream: bool
) -> None:
    """A stop token is text, but shown only with include_stop_str_in_output."""

    def text_of(**fields: object) -> str:
        response = frontend.post(COMPLETIONS, {"prompt": "x", "stream": stream, **fields})
        choices = [e["choices"][0] for e in events(response)] if stream else response.json()["choices"]
        ends = fields.get("stop_token_ids") or [fields["stop"]]
        assert [choices[-1][f"{name}_reason"] for name in ("finish", "stop")] == ["stop", *ends]
        return "".join(choice["text"] for choice in choices)

    *others, last = ids_of("one two")
    scheduler.script(lambda request: one_by_one(request, [*others, last], stop_reason=last))
    assert text_of(stop_token_ids=[last]) == TOKENIZER.decode(others)
    assert text_of(stop_token_ids=[last], include_stop_str_in_output=True) == "one two"
    scheduler.script(answering("one STOP two"))
    assert text_of(stop="STOP") == "one "
    assert text_of(stop="STOP", include_stop_str_in_output=True) == "one STOP"


def test_special_tokens_are_shown_on_request(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    eos, user = 2, TOKENIZER.encode("<|user|>", add_special_tokens=False)[0]
    scheduler.script(lambda request: one_by_one(request, [*ids_of("a"), user, *ids_of("b"), eos]))

    def text_of(**fields: object) -> str:
        return frontend.post(COMPLETIONS, {"prompt": "x", **fields}).json()["choices"][0]["text"]

    assert text_of() == "ab"
    assert text_of(skip_special_tokens=False) == "a<|user|>b"
    assert text_of(skip_special_tokens=False, include_stop_str_in_output=True) == "a<|user|>b<|eos|>"
    assert text_of(skip_special_tokens=False, ignore_eos=True) == "a<|user|>b<|eos|>"


def test_prompts_are_truncated_at_their_beginning(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("x"))
    long = [5, *range(300, 300 + CONTEXT + 50)]
    cases = [
        ({"prompt": long, "truncate_prompt_tokens": 7}, long[-7:]),
        ({"prompt": long, "truncate_prompt_tokens": -1}, long[-(CONTEXT - 16) :]),
        ({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 100}, long[-(CONTEXT - 100) :]),
        ({"prompt": long[:4], "truncate_prompt_tokens": 7}, long[:4]),
        ({"prompt": "a b c d", "truncate_prompt_tokens": 3}, [1, *TOKENIZER.encode("a b c d")[-2:]]),  # BOS stays
    ]
    for index, (body, kept) in enumerate(cases):
        assert frontend.post(COMPLETIONS, body).status_code == 200
        assert unpack(scheduler.request(index).token_ids).tolist() == kept
    assert frontend.post("/tokenize", body).json()["tokens"] == kept
    for path, wrong in ((COMPLETIONS, 0), (COMPLETIONS, CONTEXT + 1), ("/tokenize", 0)):
        refused = frontend.post(path, {"prompt": "x", "truncate_prompt_tokens": wrong})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_special_tokens_around_prompts_are_added_on_request(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("x"))
    bodies = [{"prompt": "Hi"}, {"prompt": "Hi", "add_special_tokens": False}]
    for body in bodies:
        frontend.post(COMPLETIONS, body)
    for more in ({}, {"add_special_tokens": True}):
        frontend.post(CHAT, {"messages": [USER], **more})
    shown = [prompt_of(request) for request in scheduler.requests]
    chat = "<|bos|><|user|>Hi<|eos|><|assistant|>"
    assert shown == ["<|bos|>Hi", "Hi", chat, f"<|bos|>{chat}"]


def test_token_ids_are_returned_on_request(frontend: Frontend, scheduler: ScriptedScheduler, stream: bool) -> None:
    scheduler.script(answering("Grüße, 世界"))
    said = ids_of("Grüße, 世界")
    for path, body in ((COMPLETIONS, {"prompt": [5, 6]}), (CHAT, {"messages": [USER]})):
        scheduler.requests.clear()
        response = frontend.post(path, {**body, "return_token_ids": True, "stream": stream})
        answers = events(response) if stream else [response.json()]
        choices = [answer["choices"][0] for answer in answers]
        assert [token for choice in choices for token in choice.get("token_ids") or []] == said
        holders = choices if path == COMPLETIONS else answers
        prompts = [holder["prompt_token_ids"] for holder in holders if holder.get("prompt_token_ids")]
        assert prompts == [unpack(scheduler.request().token_ids).tolist()]
    plain = frontend.post(COMPLETIONS, {"prompt": [5, 6]}).json()["choices"][0]
    assert "token_ids" not in plain
    assert "prompt_token_ids" not in plain


def test_every_event_has_the_usage_on_request(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering("one two three"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((COMPLETIONS, {"prompt": [5, 6]}), (CHAT, {"messages": [USER]})):
        response = frontend.post(path, {**body, "stream": True, "stream_options": options})
        *chunks, last = events(response)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == 0 or path == COMPLETIONS, "the first event of a chat has no text"
        assert (last["choices"], counts[-1]) == ([], len(ids_of("one two three")))
        assert last["usage"] == chunks[-1]["usage"]
    response = frontend.post(COMPLETIONS, {"prompt": [5], "stream": True, "stream_options": {"include_usage": False}})
    assert all("usage" not in event for event in events(response))


def test_last_message_of_a_conversation_is_continued(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    scheduler.script(answering(" there"))
    begun = [USER, {"role": "assistant", "content": "Hello"}]
    going_on = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    answer = frontend.post(CHAT, going_on).json()["choices"][0]["message"]
    assert (answer["role"], answer["content"]) == ("assistant", " there")
    assert prompt_of(scheduler.request()) == "<|bos|><|user|>Hi<|eos|><|assistant|>Hello"
    echoed = frontend.post(CHAT, {**going_on, "echo": True}).json()["choices"][0]["message"]
    assert echoed["content"] == "Hello there"
    chunks = events(frontend.post(CHAT, {**going_on, "echo": True, "stream": True}))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hello there"
    frontend.post(CHAT, {"messages": begun, "add_generation_prompt": False})
    shown = prompt_of(scheduler.request(3))
    assert shown == "<|bos|><|user|>Hi<|eos|><|assistant|>Hello<|eos|>"
    both = frontend.post(CHAT, {"messages": begun, "continue_final_message": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, (GrammarKind.JSON_OBJECT, "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            (GrammarKind.JSON, SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, (GrammarKind.JSON, SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, (GrammarKind.JSON, SCHEMA)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            (GrammarKind.JSON, {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            (GrammarKind.JSON, {"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}),
        ),
        ({"structured_outputs": {"json_object": True}}, (GrammarKind.JSON_OBJECT, "")),
        ({"structured_outputs": {"regex": "[a-z]+"}}, (GrammarKind.REGEX, "[a-z]+")),
        ({"structured_outputs": {"choice": ["yes", "nö"]}}, (GrammarKind.CHOICE, ["yes", "nö"])),
        ({"structured_outputs": {"grammar": "start: x"}}, (GrammarKind.GRAMMAR, "start: x")),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<f>"}], "triggers": ["<f"]}},
            (
                GrammarKind.STRUCTURAL_TAG,
                {"type": "structural_tag", "structures": [{"begin": "<f>"}], "triggers": ["<f"]},
            ),
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, (GrammarKind.STRUCTURAL_TAG, {})),
    ],
)  # fmt: skip
def test_constraints_on_the_output_reach_the_engine(
    frontend: Frontend, scheduler: ScriptedScheduler, fields: dict[str, object], wanted: tuple[object, object]
) -> None:
    scheduler.script(answering("x"))
    assert frontend.post(CHAT, {"messages": [USER], **fields}).status_code == 200
    structured = scheduler.request().structured
    if wanted is None:
        assert structured is None
        return
    assert isinstance(structured, StructuredOutputParams)
    kind, text = wanted
    assert structured.kind == kind
    assert (structured.text if isinstance(text, str) else json.loads(structured.text)) == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "triggers": []}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["x"]}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": "x", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "x": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"x": "y" * 270_000}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"bad_words": ["x", ""]}, "bad_words"), ({"bad_words": [5]}, "bad_words"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"), ({"n": 0}, "n"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"guided_json": SCHEMA}, "guided_json"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"priority": -1}, "priority"),
    ],
)  # fmt: skip
def test_invalid_constraints_are_refused_by_name(
    frontend: Frontend, scheduler: ScriptedScheduler, fields: dict[str, object], param: str
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
        response = frontend.post(path, {**body, **fields})
        assert response.status_code == 400, response.text[:300]
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert param in error["message"]
    assert scheduler.requests == []


def test_priority_is_accepted_while_an_engine_orders_by_it() -> None:
    ordering = replace(READY, info={"scheduling_policy": "priority"})
    with (
        endpoint() as other,
        closing(ScriptedScheduler(other, ordering)) as second,
        scripted(more_endpoints=[other]) as (frontend, first),
    ):
        wait_until(lambda: frontend.metric("engine_ready") == 2, "both engines are ready")
        for engine in (first, second):
            engine.script(answering("a"))
        assert frontend.post(COMPLETIONS, {"prompt": [5], "priority": -1}).status_code == 200


def test_a_grammar_that_does_not_compile_is_a_400_that_names_its_field(
    frontend: Frontend, scheduler: ScriptedScheduler
) -> None:
    """A refusal for the engine's settings, as of its adapter, does not."""
    for stream, by_settings in ((False, False), (True, False), (False, True)):
        fields = {"message": "line 1: expected a rule", "by_settings": by_settings}
        scheduler.script(lambda r: [ended(r.number, FinishReason.INVALID, **fields)])  # noqa: B023
        body = {"prompt": "x", "structured_outputs": {"grammar": "?"}, "stream": stream}
        response = frontend.post(COMPLETIONS, body)
        assert response.status_code == 400
        error = response.json()["error"]
        param = None if by_settings else "structured_outputs"
        assert (error["param"], error["message"]) == (param, "line 1: expected a rule")
