"""A group of real rank processes behind the interface of one `ModelRunner`: every rank gets every plan."""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.integration.native.driver import Driver
from tests.ranks.process import read, write

encode = msgspec.msgpack.encode


class RankError(Exception):
    """What a rank raised: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Process:
    """One rank's process; commands are answered in order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that `select` tells whether an answer is there
        )

    def send(self, name: str, payload: object = None) -> None:
        write(self._process.stdin, [name, payload])

    def receive(self) -> Any:
        """The next answer. Raises: RankError, EOFError"""
        ok, *rest = read(self._process.stdout)
        if not ok:
            raise RankError(*rest)
        return rest[0]

    def call(self, name: str, payload: object = None) -> Any:
        self.send(name, payload)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def stdout(self) -> BinaryIO:
        return self._process.stdout

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Tells the process to end, stopped or hanging ones too."""
        self.signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()

    def wait(self) -> int:
        """The exit status, after `end`."""
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()


@dataclass
class Answer:
    """What the ranks answered to one command, once that was read."""

    of: list[Any] = field(default_factory=list)


class Group:
    """`processes` as one group of `tp` x `pp` ranks; a `ModelRunner` as far as `Driver` needs one."""

    def __init__(self, processes: list[Process], model: Path, tp: int, pp: int, **config: object) -> None:
        assert len(processes) == tp * pp
        self.ranks, self.tp, self.pp, self.epoch = processes, tp, pp, 0
        self.loaded: list[Loaded] = []
        """Of each rank."""
        self.progress: list[int] = []
        """How often each rank reported progress when it loaded."""
        self.config = {"model": str(model), "threads": 1, "dtype": "float32", **config}
        self._unread: deque[Answer] = deque()
        self.call("open", self.config)

    @property
    def output(self) -> int:
        return (self.pp - 1) * self.tp

    def post(self, name: str, payload: object = None) -> Answer:
        for rank in self.ranks:
            rank.send(name, payload)
        self._unread.append(Answer())
        return self._unread[-1]

    def call(self, name: str, payload: object = None) -> list[Any]:
        return self.wait(self.post(name, payload))

    def wait(self, answer: Answer) -> list[Any]:
        """Reads answers up to this one."""
        while not answer.of:
            self._unread.popleft().of[:] = [rank.receive() for rank in self.ranks]
        return answer.of

    def forget(self) -> None:
        """Answers that were posted for are not waited for: a test has read them."""
        self._unread.clear()

    def identify(self) -> list[object]:
        return self.call("open", self.config)[0]

    def load(self, assignment: Assignment, progress: Callable[[str, float], None]) -> Loaded:
        self.epoch += 1
        rendezvous = self.call("listen")[0]
        for number, rank in enumerate(self.ranks):
            mine = msgspec.structs.replace(
                assignment,
                epoch=self.epoch,
                rank=number,
                world_size=len(self.ranks),
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=self.pp,
                rendezvous=rendezvous,
            )
            rank.send("load", encode(mine))
        answers = [rank.receive() for rank in self.ranks]
        self.progress = [answer["progress"] for answer in answers]
        self.loaded = [msgspec.msgpack.decode(answer["loaded"], type=Loaded) for answer in answers]
        return self.loaded[self.output]

    def init_kv_cache(self, init: InitializeCache) -> None:
        self.call("cache", encode(init))

    def execute_model(self, step: SchedulerOutput) -> Answer:
        self._executed = self.post("execute", encode(step))
        return self._executed

    def logits(self) -> Callable[[], torch.Tensor]:
        """float32[rows, vocab] of the step executed last, once it is read."""
        answer = self._executed

        def get() -> torch.Tensor:
            data, shape = self.wait(answer)[self.output]
            return torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape).copy())

        return get

    def sample_tokens(self, grammar: GrammarOutput | None) -> "Handle":
        return Handle(self, self.post("sample", None if grammar is None else encode(grammar)))

    def release(self, slots: NDArray[np.int32]) -> None:
        self.call("release", slots.tobytes())


@dataclass(frozen=True)
class Handle:
    group: Group
    answer: Answer

    def get(self) -> ModelRunnerOutput:
        """The output rank's result; the others must have none."""
        answers = self.group.wait(self.answer)
        assert [i for i, answer in enumerate(answers) if answer is not None] == [self.group.output]
        return msgspec.msgpack.decode(answers[self.group.output], type=ModelRunnerOutput)


class GroupDriver(Driver):
    """A `Driver` of a whole group."""

    runner: Group

    def __init__(self, group: Group, model: Path, **options: Any) -> None:
        super().__init__(model, runner=group, **options)

    def pending_logits(self) -> Callable[[], torch.Tensor]:
        return self.runner.logits()
