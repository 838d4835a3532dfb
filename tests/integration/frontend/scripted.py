"""A frontend as a real process, and a scripted double in place of the scheduler.

The double uses the real protocol on a real socket; only its outputs are invented.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from protocol.codec import Decoder, pack, unpack
from protocol.handshake import Hello
from protocol.records import Subscribe
from protocol.requests import (
    AbortRequest,
    ClientMessage,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
)
from protocol.transport import PeerGone, Server
from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig
from services.frontend.text.tokenizer import Tokenizer
from tests.metrics import total
from tests.preloaded import ERRORS, PreloadedProcess
from tests.waiting import PATIENCE, wait_until

CONTEXT, VOCAB = 2048, 4096
READY = EngineState(
    EnginePhase.READY,
    max_model_len=CONTEXT,
    vocab_size=VOCAB,
    stats={"num_requests_running": 3},
    info={"scheduling_policy": "fcfs"},
)
TOKENIZER = Tokenizer(DEMO_MODEL)

Behaviour = Callable[[GenerateRequest], list[RequestOutputs]]
SMALL_BUFFERS = """
import contextlib, socket
from services.frontend import service
from services.frontend.http import connection
listen = service.listen
@contextlib.contextmanager
def listen_with_small_buffers(config):
    with listen(config) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield listener
service.listen = listen_with_small_buffers
"""
"""Code that a frontend process runs first, so that a client that does not read fills its buffers soon."""


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompt_of(request: GenerateRequest) -> str:
    return TOKENIZER.decode(unpack(request.token_ids).tolist(), show_special=True)


def tokens(number: int, ids: list[int], first: int = 0) -> RequestOutputs:
    """Return the message of one step with tokens of one request, from index `first` on."""
    indices = list(range(first, first + len(ids)))
    return RequestOutputs(pack([number] * len(ids)), pack(indices), pack(ids))


def ended(number: int, reason: FinishReason = FinishReason.STOP, **more: object) -> RequestOutputs:
    return RequestOutputs(b"", b"", b"", [Finish(number, reason, **more)])


def one_by_one(request: GenerateRequest, ids: list[int], **end: object) -> list[RequestOutputs]:
    """Return a message per token, then the end."""
    steps = [tokens(request.number, [token], index) for index, token in enumerate(ids)]
    return [*steps, ended(request.number, **end)]


def answering(text: str, **end: object) -> Behaviour:
    return lambda request: one_by_one(request, ids_of(text), **end)


def silent(_: GenerateRequest) -> list[RequestOutputs]:
    return []


class ScriptedScheduler:
    """A double of the scheduler, in a thread. `on_request` returns the messages that answer a request."""

    def __init__(self, endpoint: str, state: EngineState = READY) -> None:
        self.on_request: Behaviour = silent
        self.requests: list[GenerateRequest] = []
        self.aborted: set[int] = set()
        self.is_subscribed = False
        self.state = state
        self._endpoint = endpoint
        self._outbox: deque[EngineMessage | bytes] = deque()
        self._decoder: Decoder[GenerateRequest | AbortRequest | Subscribe] = Decoder(ClientMessage)
        self.open()

    def open(self) -> None:
        """Begin to serve; after `close` as the next scheduler."""
        self._server = Server(self._endpoint, {"frontend"})
        self._peer: bytes | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, message: EngineMessage | bytes) -> None:
        """Send a message, or a frame as it is."""
        if isinstance(message, EngineState):
            self.state = message
        self._outbox.append(message)

    def script(self, behaviour: Behaviour) -> None:
        self.on_request = behaviour
        self.requests.clear()
        self.aborted.clear()

    def request(self, index: int = 0) -> GenerateRequest:
        """Wait for the request with this index since the last script."""
        wait_until(lambda: len(self.requests) > index, f"request {index} arrived")
        return self.requests[index]

    def wait_aborted(self, number: int) -> None:
        wait_until(lambda: number in self.aborted, f"request {number} was aborted")

    def _run(self) -> None:
        while not self._stop.is_set():
            self._server.socket.poll(2)
            with suppress(PeerGone):  # the frontend has ended
                self._turn()

    def _turn(self) -> None:
        while (received := self._server.receive()) is not None:
            self._on_message(*received)
        while self._outbox and self._peer is not None:
            message = self._outbox.popleft()
            if isinstance(message, bytes):
                self._server.send_frame(self._peer, message)
            else:
                self._server.send(self._peer, message)

    def _on_message(self, peer: bytes, frame: Hello | bytes) -> None:
        if isinstance(frame, Hello):
            self._peer = peer
            self._server.send(peer, self.state)
            return
        message = self._decoder.decode(frame)
        if isinstance(message, AbortRequest):
            self.aborted.update(message.numbers)
            return
        if isinstance(message, Subscribe):
            self.is_subscribed = message.steps
        if not isinstance(message, GenerateRequest):
            return
        self.requests.append(message)
        for output in self.on_request(message):
            self._server.send(peer, output)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._server.close()


class Frontend:
    """A frontend process."""

    def __init__(self, config: FrontendConfig, patch: str = "") -> None:
        """
        Args:
            patch: code that the process runs before the service.
        """
        code = (
            "import sys\nfrom services.cli.start import start\nfrom services.config import FrontendConfig\n"
            f"{patch}\nsys.exit(start(FrontendConfig.model_validate_json(sys.argv[1])))"
        )
        self._log: list[str] = []
        with pytest.MonkeyPatch.context() as patch_environment:
            for name in [name for name in os.environ if name.startswith("RUNAHEAD_")]:
                patch_environment.delenv(name)
            self.process = PreloadedProcess(code, config.model_dump_json(), pipes=(ERRORS,))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        self._log.extend(iter(self.process.stderr.readline, ""))

    @property
    def log(self) -> str:
        return "".join(self._log)

    @property
    def url(self) -> str:
        listening = re.compile(r'listening on (http://[^\s"]+)')
        wait_until(lambda: listening.search(self.log) or self.process.poll() is not None, "it listens")
        found = listening.search(self.log)
        assert found, self.log
        return found[1]

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/readyz").status_code == 200

    def wait_ready(self) -> None:
        wait_until(self.ready, "the frontend is ready")

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        content = options.pop("content", None)
        data = content if content is not None else json.dumps(body).encode()
        return httpx.post(self.url + path, content=data, timeout=PATIENCE, **options)

    def post_later(self, path: str, body: object, **options: object) -> Future[httpx.Response]:
        """Post from another thread."""
        return ThreadPoolExecutor(1).submit(self.post, path, body, **options)

    def client(self, key: str = "none") -> OpenAI:
        """Its connections end with their answers. A client that nobody closes is garbage in a cycle, where Python may
        finalise a socket first, and warn."""
        close = {"Connection": "close"}
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, default_headers=close)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metric(self, name: str, prefix: str = "runahead", **labels: str) -> float:
        """Return the sum of all samples with these labels."""
        return total(httpx.get(f"{self.url}/metrics").text, f"{prefix}:{name}", **labels)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(PATIENCE)
        self._reader.join()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stderr.close()


@contextmanager
def endpoint() -> Iterator[str]:
    directory = Path(tempfile.mkdtemp(prefix="ra-"))
    try:
        yield f"ipc://{directory}/clients"
    finally:
        shutil.rmtree(directory)


@contextmanager
def scripted(
    patch: str = "", state: EngineState = READY, more_endpoints: Sequence[str] = (), **config: object
) -> Iterator[tuple[Frontend, ScriptedScheduler]]:
    """Run a frontend with its scripted scheduler; both are ended. `more_endpoints`: those of other schedulers."""
    with endpoint() as address:
        scheduler = ScriptedScheduler(address, state)
        frontend = Frontend(
            FrontendConfig.model_validate(
                {"model": str(DEMO_MODEL), "scheduler_endpoint": [address, *more_endpoints], "port": 0, **config}
            ),
            patch,
        )
        try:
            if state.phase is EnginePhase.READY:
                frontend.wait_ready()
            yield frontend, scheduler
        finally:
            frontend.close()
            scheduler.close()
