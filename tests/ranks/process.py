"""A rank in a process of its own: a runner behind a pipe. `tests.ranks.group` starts it.

Each frame on stdin is a command, each frame on stdout its answer, in order: length (4 bytes), then msgpack of
[name, payload] and of [True, payload] or [False, type of the error, its text]. `abort` has no answer: the thread that
reads calls it at once.
"""

import os
import queue
import socket
import struct
import threading
from collections import deque
from typing import Any, BinaryIO

import msgspec
import numpy as np

from protocol.codec import Decoder, unpack
from protocol.membership import Assignment, InitializeCache
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepMessage
from services.config import WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.backends.native.stages import NativeOutput
from services.worker.backends.registry import create_runner
from services.worker.distributed.rendezvous import listen
from services.worker.runner import ModelRunner, Output
from services.worker.step_queue import SampleStep, StepQueue

HEAD = struct.Struct("<I")
MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)


def write(stream: BinaryIO, value: object) -> None:
    body = msgspec.msgpack.encode(value)
    stream.write(HEAD.pack(len(body)) + body)
    stream.flush()


def read(stream: BinaryIO) -> Any:
    """Return the value of the next frame.

    Raises: EOFError
    """
    return msgspec.msgpack.decode(_exactly(stream, HEAD.unpack(_exactly(stream, HEAD.size))[0]))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise EOFError("the other side of the pipe is gone")
        data += more
    return data


class ServedRank:
    """The commands, one method each. Payloads are msgpack of the protocol's structs."""

    def __init__(self) -> None:
        self.runner: ModelRunner = NativeRunner(WorkerConfig())
        self.listener: socket.socket | None = None
        self.outputs: deque[Output] = deque()
        self.queue = StepQueue()

    def answer(self, name: str, payload: Any) -> tuple[object, ...]:
        """Execute a command. Return the frame that answers it."""
        try:
            return True, getattr(self, name)(payload)
        except Exception as error:
            return False, type(error).__name__, str(error)

    def open(self, config: dict[str, Any]) -> object:
        """Take another model, without loading it."""
        self.runner.shutdown()
        self.runner = create_runner(WorkerConfig(**config))
        identity = self.runner.identify()
        return identity.tensor_parallel_sizes, identity.max_pipeline_parallel_size

    def listen(self, _: None) -> str:
        if self.listener is not None:
            self.listener.close()
        self.listener = listen("127.0.0.1")
        host, port = self.listener.getsockname()
        return f"{host}:{port}"

    def load(self, assignment: bytes) -> object:
        """Return also how often progress was reported: never, if the weights were kept."""
        listener, self.listener = self.listener, None
        reported: list[float] = []
        plan = msgspec.msgpack.decode(assignment, type=Assignment)
        loaded = self.runner.load(plan, lambda phase, fraction: reported.append(fraction), listener)
        return {"loaded": msgspec.msgpack.encode(loaded), "progress": len(reported)}

    def cache(self, init: bytes) -> None:
        self.runner.init_kv_cache(msgspec.msgpack.decode(init, type=InitializeCache))

    def execute(self, step: bytes) -> object:
        """Return the float32 logits and their shape, or None on a rank that does not sample. For the native backend."""
        assert isinstance(self.runner, NativeRunner)
        self.runner.execute_model(msgspec.msgpack.decode(step, type=SchedulerOutput))
        logits = self.runner.epoch.logits
        return None if logits is None else (logits.numpy().tobytes(), logits.shape)

    def sample(self, _: None) -> bytes | None:
        result = self.runner.sample_tokens(None).get()
        return msgspec.msgpack.encode(result) if isinstance(result, ModelRunnerOutput) else None

    def launch(self, step: bytes) -> None:
        """Execute and sample a step without waiting for its result."""
        self.runner.execute_model(msgspec.msgpack.decode(step, type=SchedulerOutput))
        self.outputs.append(self.runner.sample_tokens(None))

    def masks(self, grammar: bytes) -> None:
        self.runner.add_masks(msgspec.msgpack.decode(grammar, type=GrammarOutput))

    def ended(self, _: None) -> bool:
        """Return whether the oldest launched step has ended. For the native backend."""
        oldest = self.outputs[0]
        assert isinstance(oldest, NativeOutput)
        return oldest.result.done()

    def steps(self, messages: list[bytes]) -> int:
        """Read messages of the scheduler, then compute until a step waits for its masks, as the service does with a
        runner that computes on the thread that reads. Return the number of results."""
        for message in map(MESSAGES.decode, messages):
            self.queue.put(message, 0.0)
        while (queued := self.queue.next()) is not None:
            match queued.action:
                case SchedulerOutput() as step:
                    self.runner.execute_model(step)
                    if not self.queue.waits:
                        self.outputs.append(self.runner.sample_tokens(None))
                case SampleStep(grammar):
                    self.outputs.append(self.runner.sample_tokens(grammar))
                case release:
                    self.runner.release(np.array(unpack(release.slots)))  # type: ignore[union-attr]
        return len(self.outputs)

    def result(self, _: None) -> bytes | None:
        result = self.outputs.popleft().get()
        return msgspec.msgpack.encode(result) if isinstance(result, ModelRunnerOutput) else None

    def release(self, slots: bytes) -> None:
        self.runner.release(np.array(unpack(slots)))

    def leave(self, _: None) -> None:
        self.queue = StepQueue()
        self.runner.leave()


def serve(rank: ServedRank) -> None:
    commands: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def receive() -> None:
        with os.fdopen(0, "rb", closefd=False) as stream:
            try:
                while True:
                    name, payload = read(stream)
                    if name == "abort":
                        rank.runner.abort()
                    else:
                        commands.put((name, payload))
            except EOFError:
                rank.runner.abort()
                commands.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while (command := commands.get()) is not None:
        write(answers, rank.answer(*command))
    rank.runner.shutdown()
