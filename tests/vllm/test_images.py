"""Images in prompts: tokens equal those of vLLM's own `LLM.chat`, and broken images end their request only."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from protocol.codec import pack, unpack
from protocol.media import MAX_IMAGES, ImageJob, ProcessorSettings
from protocol.sampling import SamplingParams
from services.frontend.openai.prompts.conversation import conversation, image_urls
from services.frontend.openai.schemas.requests import ChatRequest
from services.worker.backends.vllm.image_processor import MAX_PIXELS, ImageProcessor
from tests.e2e.server import ServeProcess, serving, wait_until
from tests.vllm import checkpoints
from tests.vllm.driver import BLOCK, VllmRun, VllmStream, VllmWorker
from tests.vllm.preloaded import processes
from tests.vllm.reference import chat
from tests.vllm.test_lora_served import running_requests

JSON = dict[str, Any]
CONTEXT, CHUNK = 512, 128
"""A step has room for one image of 91 tokens, and a part of the next one."""


def image_url(seed: int, width: int = 100, height: int = 70, form: str = "PNG", **saved: Any) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **saved)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def user(*parts: str) -> JSON:
    """Return a message of texts and images."""
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": part}}
            if part.startswith("data:")
            else {"type": "text", "text": part}
            for part in parts
        ],
    }


A, B = image_url(1), image_url(2, 60, 120)
JPEG, WEBP = image_url(3, form="JPEG"), image_url(4, form="WEBP", lossless=True)
CONVERSATIONS = [
    [user("Once", A, "upon a time")],
    [user("Once", B, "upon a time")],
    [user("Two", A, "and", B, "here")],
    [user("Once", A, "upon a time"), {"role": "assistant", "content": "Yes."}, user(JPEG, "more", A)],
    [user(WEBP)],
    [{"role": "user", "content": "Once upon a time"}],
]
PARAMS: list[JSON] = [
    {"temperature": 0.8, "seed": 7} if number % 3 == 2 else {"temperature": 0.0}
    for number in range(len(CONVERSATIONS))
]
OUTPUT = 100


class ImageAnswers(msgspec.Struct):
    prompts: list[list[int]]
    together: dict[str, list[list[int]]]
    cached: list[list[int]]
    hits: float
    preempted: list[list[int]]
    preemptions: float
    kept: int
    """Images whose encoded form is kept when all requests have ended."""


def answer(model: str) -> ImageAnswers:
    """Needs a new process, because it creates vLLM."""
    processor = ImageProcessor(ProcessorSettings(model, "float32"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = [conversation(ChatRequest.model_validate({"messages": c})).messages for c in CONVERSATIONS]
    for message in rendered[-1]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    rendered[3][1]["content"] = [{"type": "text", "text": rendered[3][1]["content"]}]
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in rendered
    ]
    urls = [image_urls(ChatRequest.model_validate({"messages": c})) for c in CONVERSATIONS]
    processed = [
        processor.process(ImageJob(pack(prompt), images)) if images else None
        for prompt, images in zip(prompts, urls, strict=True)
    ]
    expanded = [
        prompt if done is None else unpack(done.token_ids).tolist()
        for prompt, done in zip(prompts, processed, strict=True)
    ]

    def serve(run: VllmRun) -> list[list[int]]:
        streams = [
            VllmStream(
                prompt,
                SamplingParams(max_tokens=OUTPUT, **params),
                media=None if done is None else done.media,
            )
            for prompt, done, params in zip(expanded, processed, PARAMS, strict=True)
        ]
        return [stream.tokens for stream in run.serve(*streams)]

    worker = VllmWorker(model=model, dtype="float32", context=CONTEXT, chunk=CHUNK)
    together = {}
    for depth in (1, 2, 3):
        with VllmRun(worker, depth) as run:
            together[f"depth {depth}"] = serve(run)
    with VllmRun(worker, 2) as run:
        serve(run)
        before = run.core.stats()["prefix_cache_hits"]
        cached = serve(run)
        hits = run.core.stats()["prefix_cache_hits"] - before
    with VllmRun(worker, 3, num_blocks=20) as run:
        preempted, preemptions = serve(run), run.core.stats()["num_preemptions"]
        kept = len(worker.runner.engine.runner.encoder_cache)
    return ImageAnswers(expanded, together, cached, hits, preempted, preemptions, kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_image_model(tmp_path_factory.mktemp("images") / "idefics3")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServeProcess]:
    with serving(
        str(model), "--backend", "vllm", "--enforce-eager", "--threads", "1", "--block-size", str(BLOCK), "--dtype",
        "float32", "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CHUNK),
        "--kv-cache-memory-bytes", str(64 << 20), forked=False,
    ) as running:  # fmt: skip
        yield running


def request(server: ServeProcess, messages: list[JSON], **fields: Any) -> httpx.Response:
    body = {
        "messages": messages,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def test_tokens_equal_vllms(model: Path, server: ServeProcess) -> None:
    """Through HTTP, too, while the worker is killed."""
    given = [{**params, "max_tokens": OUTPUT, "ignore_eos": True} for params in PARAMS]
    with processes() as pool, ThreadPoolExecutor(len(CONVERSATIONS)) as threads:
        mine = pool.submit(answer, str(model))
        expected = pool.submit(chat, str(model), CONVERSATIONS, given, max_model_len=CONTEXT).result()
        answers = [tokens for _, tokens in expected]
        both = list(zip(CONVERSATIONS, PARAMS, strict=True))
        alone = [tokens_of(request(server, messages, **params)) for messages, params in both]
        running = [threads.submit(request, server, messages, **params) for messages, params in both * 2]
        wait_until(lambda: running_requests(server) >= len(answers), "streams")
        server.services["worker"].kill()
        served = [tokens_of(future.result()) for future in running]
        found = mine.result()
    assert len({tuple(tokens) for tokens in answers}) == len(answers)
    assert found.prompts == [prompt for prompt, _ in expected]
    assert found.together == dict.fromkeys(found.together, answers)
    assert (found.cached, found.preempted) == (answers, answers)
    assert found.preemptions > 0
    assert found.hits > 300, "blocks of images are found by their contents"
    assert found.kept <= 1
    assert alone == answers
    assert served == answers * 2


def bomb() -> str:
    """Return a small file of a large image."""
    file = io.BytesIO()
    Image.new("1", (MAX_PIXELS >> 12, 1 << 13)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_bad_images_end_their_request_only(server: ServeProcess) -> None:
    frames = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]}
    for part, why in (
        ("data:image/png;base64,$$", "base64"),
        ("data:image/png;base64,AAAA", "broken"),
        ("data:image/png;base64,AAA", "base64"),
        (A[: len("data:image/png;base64,") + 8000], "broken"),
        (image_url(5, form="GIF"), "PNG, JPEG, WEBP"),
        (image_url(5, 8, 8, form="WEBP", **frames), "several frames"),
        (bomb(), "pixels"),
    ):
        response = request(server, [user("Once", part)])
        assert (response.status_code, why in response.text) == (400, True), response.text
    for url in ("http://127.0.0.1/a.png", "file:///etc/passwd", "data:text/plain;base64,AAAA", ""):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        response = request(server, [{"role": "user", "content": content}])
        assert (response.status_code, "data URL" in response.text) == (400, True), response.text
    many = request(server, [user(*[A] * (MAX_IMAGES + 1))])
    assert (many.status_code, f"at most {MAX_IMAGES}" in many.text) == (400, True)
    long = request(server, [user(*[A] * 6)])
    assert (long.status_code, "context" in long.text) == (400, True), long.text
    assert request(server, [user("Once", A)], echo=True, add_generation_prompt=False).status_code == 400
    assert httpx.post(f"{server.url}/tokenize", json={"messages": [user(A)]}).status_code == 400
    tokens_of(request(server, [user("Once", A)]))
