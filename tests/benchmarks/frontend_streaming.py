"""Cost of a streamed token in the frontend: a real frontend process, real sockets on both sides, no model.

A scripted engine sends one message per step with a token of each of 256 streams, at a fixed pace. A separate process
reads all responses as HTTP/1.1 with server-sent events and checks that each has exactly the expected text. Under load
the frontend joins tokens in one write, so it also runs with a write for every token. With `--vllm`, vLLM's API server
runs beside it, which writes every token; it gets equal tokens at the same pace from a FAKE engine in its process
(support/vllm_paced.py). The servers of a case take turns.

`per_core_s` is tokens per second of the server process's CPU time, from the first token of the last stream until all
have ended. The report has the load of the machine.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil

from protocol.codec import Decoder, encode, pack
from protocol.handshake import Hello
from protocol.requests import (
    AbortRequest,
    ClientMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
)
from protocol.transport import PeerSlow, Server
from services.checkpoint import DEMO_MODEL
from services.config import FrontendConfig
from services.frontend.text.tokenizer import Tokenizer
from tests.benchmarks.support.report import add_ints, medians, report
from tests.benchmarks.support.servers import vllm_process

PACED = Path(__file__).parent / "support" / "vllm_paced.py"
OURS, PER_TOKEN, PEER = "runahead", "runahead, a write per token", "vLLM, fake engine"
TEXT = (
    "The scheduler plans step N+1 while the worker computes step N. Tokens come out of order? Never: "
    "each has its index.\n\n* It costs 3.5 ms, or 12 % of a core; “quoted”, naïve, 世界 and 😀 take several tokens.\n"
)
MARK = b"data: "
WRITE_PER_TOKEN = "from services.frontend.engine import streams\nstreams.MAX_TOKENS_PER_FLUSH = 1\n"

CLOCK_TICK = 0.01
"""Resolution in seconds of a process's CPU time; a short warm-up may take less."""


@dataclass(frozen=True)
class StreamingCase:
    """Number of streams and pace of their tokens."""

    name: str
    streams: int
    tokens: int
    """Tokens per stream."""
    pace: float
    """Seconds between steps."""


def output_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return (ids * (count // len(ids) + 1))[:count]


# The clients: one process for all.


class _Reader:
    """One HTTP/1.1 client with one streaming request; keeps the response."""

    def __init__(self, address: tuple[str, int], case: StreamingCase) -> None:
        self.socket = socket.create_connection(address)
        self.parts: list[bytes] = []
        self.is_opened = False
        body = {
            "prompt": "One stream of this connection.",
            "stream": True,
            "max_tokens": case.tokens,
            "temperature": 0.0,
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Read what has arrived. Return whether the response is complete."""
        part = self.socket.recv(1 << 20)
        if not part:
            raise ConnectionError(f"the frontend closed a connection after {b''.join(self.parts)[-300:]!r}")
        self.parts.append(part)
        self.is_opened = self.is_opened or MARK in part
        return part.endswith(b"0\r\n\r\n")

    def text(self) -> str:
        head, _, rest = b"".join(self.parts).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        chunks = []
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not (length := int(size, 16)):
                break
            chunks.append(rest[:length])
            rest = rest[length + 2 :]
        *events, done, nothing = b"".join(chunks).split(b"\n\n")
        assert done == MARK + b"[DONE]"
        assert nothing == b""
        choices = [choice for event in events for choice in json.loads(event.removeprefix(MARK))["choices"]]
        return "".join(choice["text"] for choice in choices)


def read_all(pipe: multiprocessing.connection.Connection) -> None:
    """Send "opened" when each stream has shown text, "ended" when all are complete, "equal" when they are checked."""
    while (job := pipe.recv()) is not None:
        url, case = job
        address = urlsplit(url)
        readers = [_Reader((address.hostname, address.port), case) for _ in range(case.streams)]
        waiting, is_opened = len(readers), False
        with selectors.DefaultSelector() as selector:
            for reader in readers:
                selector.register(reader.socket, selectors.EVENT_READ, reader)
            while waiting:
                for key, _ in selector.select():
                    if key.data.read():
                        selector.unregister(key.fileobj)
                        waiting -= 1
                if not is_opened and all(reader.is_opened for reader in readers):
                    is_opened = True
                    pipe.send("opened")
        pipe.send("ended")
        tokenizer = Tokenizer(DEMO_MODEL)
        expected = tokenizer.decode(output_ids(tokenizer, case.tokens))
        for reader in readers:
            assert reader.text() == expected, "an answer differs from the engine's text"
            reader.socket.close()
        pipe.send("equal")


# The engine: a double of the scheduler.


class Player(Protocol):
    """Source of the tokens of a round."""

    def begin(self, case: StreamingCase) -> None:
        """Send the first token of every stream when all requests have arrived."""
        ...

    def go_on(self, case: StreamingCase) -> None:
        """Send the other tokens at the pace of the case."""
        ...


class UniformEngine:
    """Answers all requests with the same tokens at the same time."""

    def __init__(self, endpoint: str, incarnation: int = 0) -> None:
        """`incarnation`: as in `EngineState`; with one, the frontend subscribes to step records."""
        self._server = Server(endpoint, {"frontend"})
        self._incarnation = incarnation
        self._decoder: Decoder[GenerateRequest | AbortRequest] = Decoder(ClientMessage)
        self._peer: bytes | None = None
        self._numbers: list[int] = []
        self._frames: deque[bytes] = deque()
        self._tokenizer = Tokenizer(DEMO_MODEL)

    def _read(self) -> None:
        while (received := self._server.receive()) is not None:
            peer, frame = received
            if isinstance(frame, Hello):
                self._peer = peer
                self.send_state()
                continue
            message = self._decoder.decode(frame)
            if self._incarnation and not isinstance(message, GenerateRequest | AbortRequest):
                continue  # a subscription, or a sign of life
            assert isinstance(message, GenerateRequest), "a request was aborted"
            self._numbers.append(message.number)

    def send_state(self) -> None:
        """Answer the frontend's handshake and its signs of life."""
        state = EngineState(EnginePhase.READY, max_model_len=4096, vocab_size=4096, incarnation=self._incarnation)
        assert self._peer is not None
        self._server.send(self._peer, state)

    def wait_connected(self) -> None:
        while self._peer is None:
            self._server.socket.poll(100)
            self._read()

    def wait_requests(self, count: int) -> None:
        self._numbers.clear()
        while len(self._numbers) < count:
            self._server.socket.poll(100)
            self._read()

    def begin(self, case: StreamingCase) -> None:
        self.wait_requests(case.streams)
        self._frames.extend(self.steps(case.tokens))
        self.send(self._frames.popleft())

    def go_on(self, case: StreamingCase) -> None:
        due = time.perf_counter()
        while self._frames:
            due += case.pace
            time.sleep(max(0.0, due - time.perf_counter()))
            self.send(self._frames.popleft())

    def steps(self, count: int) -> list[bytes]:
        numbers = pack(np.asarray(self._numbers, np.uint32).view(np.int32))
        rows = len(self._numbers)
        tokens = output_ids(self._tokenizer, count)
        frames = [
            RequestOutputs(numbers, pack([index] * rows), pack([token] * rows), incarnation=self._incarnation)
            for index, token in enumerate(tokens)
        ]
        ends = [Finish(number, FinishReason.LENGTH) for number in self._numbers]
        return [*map(encode, frames), encode(RequestOutputs(b"", b"", b"", ends, incarnation=self._incarnation))]

    def send(self, frame: bytes) -> None:
        assert self._peer is not None
        while True:
            try:
                return self._server.send_frame(self._peer, frame)
            except PeerSlow:
                time.sleep(0.001)

    def close(self) -> None:
        self._server.close()


@contextmanager
def frontend(
    patch: str, make_engine: Callable[[str], UniformEngine] = UniformEngine, step_ring: int = 0
) -> Iterator[tuple[psutil.Process, str, UniformEngine]]:
    """Yield the process, its address and its engine. Raises: RuntimeError, if it does not start"""
    code = (
        "import sys\nfrom services.cli.start import start\nfrom services.config import FrontendConfig\n"
        f"{patch}\nsys.exit(start(FrontendConfig.model_validate_json(sys.argv[1])))\n"
    )
    with tempfile.TemporaryDirectory(prefix="ra-") as directory:
        endpoint, log = f"ipc://{directory}/clients", Path(directory) / "log"
        engine = make_engine(endpoint)
        config = FrontendConfig(model=str(DEMO_MODEL), scheduler_endpoint=endpoint, port=0, step_ring=step_ring)
        with log.open("w") as stderr:
            process = psutil.Popen([sys.executable, "-c", code, config.model_dump_json()], stderr=stderr)
        try:
            while "listening on " not in (text := log.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(f"the frontend ended with {process.returncode}: {text}")
                time.sleep(0.05)
            url = text.partition("listening on ")[2].split()[0]
            engine.wait_connected()
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.05)
            yield process, url, engine
        finally:
            process.terminate()
            process.wait()
            engine.close()


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def client_process() -> Iterator[multiprocessing.connection.Connection]:
    """Yield the pipe to a process that runs `read_all`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    clients = context.Process(target=read_all, args=(theirs,), daemon=True)
    clients.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.send(None)
        clients.join()


def round_of(
    case: StreamingCase,
    process: psutil.Process,
    url: str,
    engine: Player,
    clients: multiprocessing.connection.Connection,
) -> dict[str, float]:
    clients.send((url, case))
    engine.begin(case)
    assert clients.recv() == "opened"
    opened, started = cpu(process), time.perf_counter()
    engine.go_on(case)
    assert clients.recv() == "ended"
    ended, stopped = cpu(process), time.perf_counter()
    assert clients.recv() == "equal"
    after_first = case.streams * (case.tokens - 1)
    return {
        "tokens_per_s": after_first / (stopped - started),
        "cores": (ended - opened) / (stopped - started),
        "per_core_s": after_first / max(ended - opened, CLOCK_TICK),
    }


class _FakeEngine:
    """Control of the fake engine in vLLM's process, which sends the first tokens without a signal."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def begin(self, case: StreamingCase) -> None:
        pass

    def go_on(self, case: StreamingCase) -> None:
        self._process.send_signal(signal.SIGUSR1)


@contextmanager
def vllm(case: StreamingCase) -> Iterator[tuple[psutil.Process, str, _FakeEngine]]:
    """Start vLLM's server for one case. Yield its process, its URL and its engine."""
    token_ids = output_ids(Tokenizer(DEMO_MODEL), case.tokens)
    paced = {"streams": case.streams, "pace": case.pace, "token_ids": token_ids}
    started = vllm_process(
        DEMO_MODEL, "--disable-uvicorn-access-log", run=(str(PACED),), variables={"RUNAHEAD_PACED": json.dumps(paced)}
    )
    with started as server:
        process = psutil.Process(server.session)
        yield process, server.url, _FakeEngine(process)


def rounds(case: StreamingCase, repeats: int, with_vllm: bool) -> dict[str, list[dict[str, float]]]:
    """Run `round_of` on each server in turn and return the metrics by server."""
    warm_up = StreamingCase("warm-up", case.streams, min(32, case.tokens), case.pace)
    with ExitStack() as stack:
        clients = stack.enter_context(client_process())
        servers: dict[str, tuple[psutil.Process, str, Player]] = {
            OURS: stack.enter_context(frontend("")), PER_TOKEN: stack.enter_context(frontend(WRITE_PER_TOKEN)),
        }  # fmt: skip
        if with_vllm:
            servers[PEER] = stack.enter_context(vllm(case))
        for server in servers.values():
            round_of(warm_up, *server, clients)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(repeats):
            for name, server in servers.items():
                found[name].append(round_of(case, *server, clients))
    return found


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, streams=256, tokens=128, repeats=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--vllm", action="store_true", help="vLLM's API server too")
    args = parser.parse_args()
    streams, tokens = args.streams, args.tokens
    cases = [
        StreamingCase("1 a connection, step 37.6 ms", streams, tokens, streams / 6_800),
        StreamingCase("1 a connection, step 15 ms", streams, tokens, 0.015),
    ]
    rows: list[dict[str, object]] = []
    repeats: dict[str, list[dict[str, float]]] = {}
    over_vllm: dict[str, dict[str, float]] = {}
    for case in (each for each in cases if args.only in each.name):
        found = rounds(case, args.repeats, args.vllm)
        repeats |= {f"{case.name}, {name}": each for name, each in found.items()}
        median = {name: medians(each) for name, each in found.items()}
        rows += [{"streams": case.name, "server": name, **each} for name, each in median.items()]
        if args.vllm:
            over_vllm[case.name] = {
                name: each["per_core_s"] / median[PEER]["per_core_s"] for name, each in median.items()
            }
    report(
        "frontend_streaming",
        title=f"{streams} streams of {tokens} tokens: what a frontend spends",
        rows=rows,
        figures={"over_vllm": over_vllm},
        settings=vars(args),
        repeats=repeats,
    )
