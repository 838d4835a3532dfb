"""Images and sounds in prompts: tokens equal those of vLLM's own `LLM.chat`, and broken files end one request."""

import base64
import io
import json
import logging
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import soundfile
from PIL import Image
from transformers import AutoTokenizer

from protocol.codec import pack, unpack
from protocol.lora import LoRAAdapter
from protocol.media import MAX_FILES, Media, MediaJob, MediaModel, ProcessorSettings
from protocol.membership import Assignment, Speculation
from protocol.sampling import SamplingParams
from services.config import WorkerConfig
from services.frontend.adapters import Adapters
from services.frontend.openai.prompts.conversation import conversation, media_files
from services.frontend.openai.schemas.requests import ChatRequest
from services.worker.backends.vllm.engine_config import EngineOptions, create_engine_config
from services.worker.backends.vllm.media_processor import MAX_PIXELS, MediaProcessor
from services.worker.runner import LoadError
from tests.e2e.server import PATIENCE, ServeProcess, wait_until
from tests.vllm import checkpoints, media_checkpoints
from tests.vllm.driver import BLOCK, VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import DRAFTS
from tests.vllm.preloaded import processes, serving_preloaded
from tests.vllm.reference import chat
from tests.vllm.test_lora_served import requests as requests_in

JSON = dict[str, Any]
CONTEXT, CHUNK = 512, 128
"""A step has room for one image of 91 tokens, and a part of the next one."""
SIZES = ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CHUNK))
LOCAL_FILES = """
from services.frontend import media_fetcher
media_fetcher.is_public = lambda address: address.is_loopback
media_fetcher.FETCH_SECONDS = 3600  # a test waits for the end of a request that nobody waits for any more
"""


def image_url(seed: int, width: int = 100, height: int = 70, form: str = "PNG", **saved: Any) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **saved)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def sound_url(
    seed: int, seconds: float = 2.0, rate: int = 16000, form: str = "WAV", level: float = 1.0, channels: int = 1
) -> str:
    samples = np.random.default_rng(seed).uniform(-level, level, (round(seconds * rate), channels))
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype="FLOAT" if form == "WAV" else None)
    return f"data:audio/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(text: str, kind: str = "") -> JSON:
    """Return a part of a message: the file at the address `text` of a `kind`, the file in a data URL, or a text."""
    head, _, data = text.partition(";base64,")
    if (form := head.removeprefix("data:audio/")) in ("wav", "mp3"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    if not kind and head.startswith("data:"):
        kind = head[5:10]
    return {"type": f"{kind}_url", f"{kind}_url": {"url": text}} if kind else {"type": "text", "text": text}


def user(*parts: str, kind: str = "") -> JSON:
    return {"role": "user", "content": [part("Once"), *(part(text, kind) for text in parts)]}


MORE: JSON = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}
"""Another picture in a file."""
FILES = {
    "image": [
        image_url(1), image_url(2, 60, 120), image_url(3, form="MPO", **MORE), image_url(4, form="WEBP", lossless=True),
    ],
    "audio": [
        sound_url(1), sound_url(2, 3.0, 8000, channels=2), sound_url(3, form="MP3"), sound_url(4, 1.5, 22050, "FLAC"),
    ],
}  # fmt: skip
"""Data URLs by kind. The third image is a JPEG file with another picture behind it, as telephones write it. The second
sound has two channels, and two have other sample rates than the model's."""


def conversations(kind: str) -> list[list[JSON]]:
    a, b, c, d = FILES[kind]
    return [
        [user(a, "upon a time")],
        [user(b, "upon a time")],
        [user("Two", a, "and", b, "here")],
        [user(a, "upon a time"), {"role": "assistant", "content": "Yes."}, user(c, "more", a)],
        [user(d)],
        [{"role": "user", "content": "Once upon a time"}],
    ]


PARAMS: list[JSON] = [
    {"temperature": 0.8, "seed": 7} if number % 3 == 2 else {"temperature": 0.0} for number in range(6)
]
OUTPUT = 100


class MediaAnswers(msgspec.Struct):
    prompts: list[list[int]]
    together: dict[str, list[list[int]]]
    cached: list[list[int]]
    hits: float
    preempted: list[list[int]]
    preemptions: float
    kept: int
    """Files whose encoded form is kept when all requests have ended."""
    accepted: float
    """Drafts that were right."""


class Prompts:
    """The conversations as a frontend makes them."""

    def __init__(self, model: str, conversations: list[list[JSON]]) -> None:
        processor = MediaProcessor(ProcessorSettings(model, MediaModel("float32")))
        tokenizer = AutoTokenizer.from_pretrained(model)
        given = [ChatRequest.model_validate({"messages": c}) for c in conversations]
        rendered = [conversation(body).messages for body in given]
        for message in (*rendered[-1], rendered[3][1]):
            message["content"] = [{"type": "text", "text": message["content"]}]
        self.token_ids: list[list[int]] = [
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for messages in rendered
        ]
        self.media: list[Media | None] = [None] * len(given)
        for number, body in enumerate(given):
            if files := media_files(body):
                done = processor.process(MediaJob(pack(self.token_ids[number]), files))
                self.token_ids[number], self.media[number] = unpack(done.token_ids).tolist(), done.media

    def serve(self, run: VllmRun, adapters: Sequence[LoRAAdapter | None] = (None,)) -> list[list[int]]:
        """Return the tokens of each conversation and adapter, in one batch."""
        parts = list(zip(self.token_ids, self.media, PARAMS, strict=True))
        streams = [
            VllmStream(prompt, SamplingParams(max_tokens=OUTPUT, **params), media=media, lora=lora)
            for lora in adapters
            for prompt, media, params in parts
        ]
        return [stream.tokens for stream in run.serve(*streams)]


def answer(model: str, conversations: list[list[JSON]]) -> MediaAnswers:
    """Needs a new process, because it creates vLLM."""
    prompts = Prompts(model, conversations)
    sizes = {"model": model, "dtype": "float32", "context": CONTEXT, "chunk": CHUNK}
    worker = VllmWorker(**sizes)
    with VllmRun(worker, 1) as run:
        together = {"depth 1": prompts.serve(run)}
    with VllmRun(worker, 3) as run:
        together["depth 3"] = prompts.serve(run)
        before = run.core.stats()["prefix_cache_hits"]
        cached = prompts.serve(run)
        hits = run.core.stats()["prefix_cache_hits"] - before
    with VllmRun(worker, 3, num_blocks=20) as run:
        preempted, preemptions = prompts.serve(run), run.core.stats()["num_preemptions"]
        kept = len(worker.runner.engine.runner.encoder_cache)
    worker.runner.shutdown()
    worker = VllmWorker(DRAFTS, **sizes)
    with VllmRun(worker, 3, num_blocks=20) as run:
        together["drafts"] = prompts.serve(run)
        accepted = run.core.stats()["spec_decode_num_accepted_tokens"]
    return MediaAnswers(prompts.token_ids, together, cached, hits, preempted, preemptions, kept, accepted)


def answer_adapted(model: str, adapters: list[LoRAAdapter | None]) -> tuple[dict[str, list[list[int]]], list[str]]:
    """Return the answers and the warnings of the worker. Needs a new process, because it creates vLLM."""
    prompts, answers, log = Prompts(model, conversations("image")), {}, QueueHandler(SimpleQueue())
    logging.getLogger("runahead.worker").addHandler(log)
    worker = VllmWorker(model=model, dtype="float32", context=CONTEXT, chunk=CHUNK, max_loras=2)
    for depth in (1, 3):
        with VllmRun(worker, depth) as run:
            answers[f"depth {depth}"] = prompts.serve(run, adapters)
            answers[f"depth {depth}, cached"] = prompts.serve(run, adapters)
    return answers, [log.queue.get().message for _ in range(log.queue.qsize())]


@pytest.fixture(scope="module", params=media_checkpoints.MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_checkpoints.make(request.param, tmp_path_factory.mktemp("media") / request.param)


@pytest.fixture(scope="module")
def kind(model: Path) -> str:
    return media_checkpoints.MODELS[model.name]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Files at addresses of this machine are allowed. config.json does not name the architecture."""
    directory = shutil.copytree(model, tmp_path_factory.mktemp("served") / model.name)
    config = json.loads((directory / "config.json").read_text())
    overrides = json.dumps({"architectures": config.pop("architectures")})
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Unknown"]}))
    with serving_preloaded(
        directory, *SIZES, "--hf-overrides", overrides, "--allowed-media-domains", "localhost", "10.0.0.1",
        patch=LOCAL_FILES,
    ) as running:  # fmt: skip
        yield running


def request(server: ServeProcess, messages: list[JSON], **fields: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": OUTPUT, "ignore_eos": True, "return_token_ids": True, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def test_tokens_equal_vllms(model: Path, kind: str, server: ServeProcess) -> None:
    """Through HTTP, too, while the worker is killed."""
    asked = conversations(kind)
    given = [{**params, "max_tokens": OUTPUT, "ignore_eos": True} for params in PARAMS]
    with processes() as pool, ThreadPoolExecutor(len(asked)) as threads:
        mine = pool.submit(answer, str(model), asked)
        expected = pool.submit(chat, str(model), asked, given, max_model_len=CONTEXT).result()
        answers = [tokens for _, tokens in expected]
        both = list(zip(asked, PARAMS, strict=True))
        running = [threads.submit(request, server, messages, **params) for messages, params in both * 2]
        wait_until(lambda: requests_in(server, "running") >= len(answers), "streams")
        server.services["worker"].kill()
        served = [tokens_of(future.result()) for future in running]
        found = mine.result()
    assert len({tuple(tokens) for tokens in answers}) == len(answers)
    assert found.prompts == [prompt for prompt, _ in expected]
    assert found.together == dict.fromkeys(found.together, answers)
    assert (found.cached, found.preempted) == (answers, answers)
    assert found.preemptions > 0
    assert found.hits > 300, "blocks of files are found by their contents"
    assert found.kept <= 1
    assert found.accepted > 0 or model.name == "paddleocr-vl", "its answers repeat nothing"
    assert served == answers * 2


@pytest.mark.parametrize(("name", "assigned", "config", "why"), [
    ("qwen2-audio", {"world_size": 2, "pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size above 1"),
    ("idefics3", {"speculation": Speculation("draft_model", 3)}, {}, "drafters other than ngram"),
    ("idefics3", {}, {"runner": "pooling"}, "--runner pooling"),
])  # fmt: skip
def test_other_combinations_are_refused_by_name(
    name: str, assigned: JSON, config: JSON, why: str, tmp_path: Path
) -> None:
    model = media_checkpoints.make(name, tmp_path / "model")
    sizes = {"epoch": 1, "rank": 0, "world_size": 1, "block_size": BLOCK, "num_slots": 8}
    sizes |= {"max_num_batched_tokens": CHUNK, "max_model_len": CONTEXT}
    if (drafts := assigned.get("speculation")) is not None:
        assigned = {"speculation": msgspec.structs.replace(drafts, model=str(model))}
    assignment = Assignment(**sizes | assigned)
    settings = WorkerConfig.model_validate({"model": str(model), "backend": "vllm", **config})
    options = EngineOptions(model, "float32", settings, assignment)
    with pytest.raises(LoadError, match=why):
        create_engine_config(options, {"kv_cache_memory_bytes": 1})


def test_adapters_beside_images(tmp_path: Path) -> None:
    model = media_checkpoints.make("idefics3", tmp_path / "model")
    loading, layers = Adapters(model, 8), "model.text_model.layers"
    encoder: dict[str, Any] = {"model.vision_model.encoder.layers.0.self_attn.q_proj": (64, 64)}
    adapters: list[LoRAAdapter | None] = [
        None,
        *(
            loading.load(name, str(checkpoints.make_adapter(tmp_path / name, model, ord(name), layers=layers, **more)))
            for name, more in (("a", {}), ("b", encoder))
        ),
    ]
    given = [{**params, "max_tokens": OUTPUT, "ignore_eos": True} for params in PARAMS]
    engine = {"max_model_len": CONTEXT, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with processes() as pool:
        mine = pool.submit(answer_adapted, str(model), adapters)
        expected = pool.submit(chat, str(model), conversations("image"), given, adapters, **engine).result()
        found, warnings = mine.result()
    answers = [tokens for _, tokens in expected]
    assert len({tuple(tokens) for tokens in answers}) == len(answers), "every adapter changes every answer"
    [warning] = [text for text in warnings if text.startswith("adapter")]
    assert "adapter b: vLLM ignores 1 of its 7 modules, such as model.vision_model" in warning
    assert found == dict.fromkeys(found, answers)


@pytest.mark.parametrize(
    "model",
    ["paddleocr-vl", *(pytest.param(name, marks=pytest.mark.soak) for name in ("idefics3", "qwen2-audio"))],
    indirect=True,
    scope="module",
)
def test_two_ranks_with_drafts_answer_like_one(model: Path, kind: str, server: ServeProcess) -> None:
    both = list(zip(conversations(kind), PARAMS, strict=True))
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False})
    with (
        serving_preloaded(model, *SIZES, "--tensor-parallel-size", "2", "--speculative-config", drafts) as ranks,
        ThreadPoolExecutor(2 * len(both)) as threads,
    ):
        two, one = (
            [threads.submit(request, served, messages, **params) for messages, params in both]
            for served in (ranks, server)
        )
        assert [tokens_of(future.result()) for future in two] == [tokens_of(future.result()) for future in one]
        assert ranks.metric("spec_decode_num_draft_tokens_total") > 0


class Files(BaseHTTPRequestHandler):
    """Files by path. /hang is answered when its client has left."""

    files: ClassVar[dict[str, bytes]] = {}
    hanging, left = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if self.path == "/hang":
            self.hanging.set()
            self.connection.recv(1)
            self.left.set()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.files.get(self.path, b"<html>"))

    def log_message(self, *_: object) -> None:
        pass


def test_files_at_addresses(server: ServeProcess, kind: str) -> None:
    a, b, *_ = FILES[kind]
    Files.files = {"/a.file": base64.b64decode(a.partition(",")[2]), "/b": base64.b64decode(b.partition(",")[2])}
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as files, ThreadPoolExecutor(2) as threads:
        threads.submit(files.serve_forever)
        try:
            root = f"http://localhost:{files.server_port}"
            expected = tokens_of(request(server, [user(a, b, a)], temperature=0))
            for message in (
                user(f"{root}/a.file", f"{root}/b", f"{root}/a.file", kind=kind),
                user(f"{root}/a.file", b, f"{root}/a.file", kind=kind),
            ):
                assert tokens_of(request(server, [message], temperature=0)) == expected
            broken = request(server, [user(f"{root}/page.html", kind=kind)])
            assert (broken.status_code, "broken" in broken.text) == (400, True), broken.text
            at = urlsplit(server.url)
            with socket.create_connection((at.hostname, at.port)) as client:
                body = json.dumps({"messages": [user(f"{root}/hang", kind=kind)]}).encode()
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                )
                Files.hanging.wait()
                assert tokens_of(request(server, [user(a, b, a)], temperature=0)) == expected
            assert Files.left.wait(PATIENCE), "the client left, so its file is not fetched"
        finally:
            files.shutdown()


def bomb() -> str:
    """Return a small file of a large image."""
    file = io.BytesIO()
    Image.new("1", (MAX_PIXELS >> 12, 1 << 13)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def silence() -> str:
    """Return a small file of a long sound."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(3600 * 4000, np.int16), 4000, format="FLAC")
    return f"data:audio/flac;base64,{base64.b64encode(file.getvalue()).decode()}"


def bad_files(kind: str) -> list[tuple[str, str]]:
    """Return data URLs, and what the error says about each."""
    if kind == "audio":
        return [
            (sound_url(5, form="AIFF"), "WAV, MP3, FLAC, OGG"),
            (sound_url(5, 0), "samples"),
            (sound_url(5, rate=100), "Hz"),
            (sound_url(5, rate=1_000_000, seconds=0.1), "Hz"),
            (sound_url(5, level=1e20), "beyond"),
            (silence(), "600 s"),
            (image_url(1), "reads no image"),
        ]
    return [
        (FILES[kind][0][: len("data:image/png;base64,") + 8000], "broken"),
        (image_url(5, form="GIF"), "PNG, JPEG, WEBP"),
        (image_url(5, 8, 8, form="WEBP", **MORE), "several frames"),
        (bomb(), "pixels"),
        (sound_url(1), "reads no audio"),
    ]


def test_bad_files_end_their_request_only(server: ServeProcess, kind: str) -> None:
    good = FILES[kind][0]
    head = good[: good.index(",") + 1]
    for text, why in [(f"{head}$$", "base64"), (f"{head}AAAA", "broken"), (f"{head}AAA", "base64"), *bad_files(kind)]:
        response = request(server, [user(text)])
        assert (response.status_code, why in response.text) == (400, True), response.text
    for url, why in (
        ("http://127.0.0.1/a.png", "--allowed-media-domains"),
        ("http://10.0.0.1/a.png", "public address"),
        ("file:///etc/passwd", "data URL"),
        ("data:text/plain;base64,AAAA", "data URL"),
        ("", "data URL"),
    ):
        response = request(server, [user(url, kind=kind)])
        assert (response.status_code, why in response.text) == (400, True), response.text
    many = request(server, [user(*[good] * (MAX_FILES + 1))])
    assert (many.status_code, f"at most {MAX_FILES}" in many.text) == (400, True)
    long = request(server, [user(*[good] * MAX_FILES)])
    assert (long.status_code, "context" in long.text) == (400, True), long.text
    assert request(server, [user(good)], echo=True, add_generation_prompt=False).status_code == 400
    tokens_of(request(server, [user(good)]))


def test_images_of_other_dialects_are_those_of_a_chat(server: ServeProcess, kind: str) -> None:
    said = user(file := FILES[kind][0], "upon a time")
    data = file.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [said["content"][0], {"type": "image", "source": source}, said["content"][2]]
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
    parts = [{"type": "input_text", "text": "Once"}, image, {"type": "input_text", "text": "upon a time"}]
    message = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 20}
    response = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 20}
    same = {"ignore_eos": True, "temperature": 0}
    given = {"messages": message, "responses": response}
    answers = {
        route: httpx.post(f"{server.url}/v1/{route}", json=body | same, timeout=300) for route, body in given.items()
    }
    if kind == "audio":
        for refused in answers.values():
            assert (refused.status_code, "reads no image" in refused.text) == (400, True), refused.text
        return
    chat = request(server, [said], max_tokens=20, temperature=0).json()
    message, response = (answer.json() for answer in answers.values())
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    usage = [
        message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"],
        response["usage"]["input_tokens"],
    ]
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json={"messages": given["messages"]["messages"]})
    tokenized = httpx.post(f"{server.url}/tokenize", json={"messages": [said]})
    usage += [counted.json()["input_tokens"], tokenized.json()["count"]]
    assert usage == [chat["usage"]["prompt_tokens"]] * 4
    again = {"previous_response_id": response["id"], "input": "And then?", "max_output_tokens": 20, **same}
    continued = httpx.post(f"{server.url}/v1/responses", json=again, timeout=300).json()
    assert continued["usage"]["input_tokens"] > usage[1]
    refused = httpx.post(f"{server.url}/v1/responses", json=given["responses"] | {"background": True}, timeout=300)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
