"""A group of real rank processes with the methods of one `ModelRunner`: every rank gets every plan."""

import signal
import subprocess
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
from tests.integration.native.driver import RunnerDriver
from tests.preloaded import INPUT, OUTPUT, PreloadedProcess
from tests.ranks.failures import RankFailure
from tests.ranks.process import read, write
from tests.waiting import PATIENCE

encode = msgspec.msgpack.encode


class NativeRankProcess:
    """A rank in a process; its answers come in the order of commands."""

    code = "from tests.ranks.process import ServedRank, serve; serve(ServedRank())"

    def __init__(self) -> None:
        self._process = PreloadedProcess(self.code, pipes=(INPUT, OUTPUT))

    def send(self, name: str, payload: object = None) -> None:
        write(self._process.stdin, [name, payload])

    def receive(self) -> Any:
        """Return the next answer.

        Raises: RankFailure, EOFError
        """
        ok, *rest = read(self._process.stdout)
        if not ok:
            raise RankFailure(*rest)
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
        """Make the process end, also a stopped or hanging one."""
        self.signal(signal.SIGCONT)
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()

    def wait(self) -> int:
        """Return the exit status, after `end`."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()


class RankPool:
    """Processes for any number of ranks; dead ones are replaced."""

    def __init__(self) -> None:
        self._processes: list[NativeRankProcess] = []

    def take(self, number: int) -> list[NativeRankProcess]:
        for process in [each for each in self._processes if not each.alive]:
            process.kill()  # closes its pipes
            self.discard(process)
        while len(self._processes) < number:
            self._processes.append(NativeRankProcess())
        return self._processes[:number]

    def discard(self, process: NativeRankProcess) -> None:
        self._processes.remove(process)

    def close(self) -> list[int]:
        """End all processes and return their exit statuses."""
        for process in self._processes:
            process.end()
        return [process.wait() for process in self._processes]


@dataclass
class RankAnswers:
    """The answers of all ranks to one command, once they were read."""

    values: list[Any] = field(default_factory=list)


class RankGroup:
    """`processes` as one group of `tp` x `pp` ranks, with the methods of `ModelRunner` that `RunnerDriver` uses."""

    def __init__(self, processes: list[NativeRankProcess], model: Path, tp: int, pp: int, **config: object) -> None:
        assert len(processes) == tp * pp
        self.ranks, self.tp, self.pp, self.epoch = processes, tp, pp, 0
        self.loaded: list[Loaded] = []
        """The answer of each rank to `load`."""
        self.progress: list[int] = []
        """Number of progress reports of each rank while loading."""
        self.config = {"model": str(model), "threads": 1, "dtype": "float32", **config}
        self._unread: deque[RankAnswers] = deque()
        self.call("open", self.config)

    @property
    def output(self) -> int:
        return (self.pp - 1) * self.tp

    def post(self, name: str, payload: object = None) -> RankAnswers:
        for rank in self.ranks:
            rank.send(name, payload)
        self._unread.append(RankAnswers())
        return self._unread[-1]

    def call(self, name: str, payload: object = None) -> list[Any]:
        return self.wait(self.post(name, payload))

    def wait(self, answer: RankAnswers) -> list[Any]:
        """Read answers up to this one, and return it."""
        while not answer.values:
            self._unread.popleft().values[:] = [rank.receive() for rank in self.ranks]
        return answer.values

    def drop_unread(self) -> None:
        """Wait for no posted answer: the test has read them."""
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

    def execute_model(self, step: SchedulerOutput) -> RankAnswers:
        self._executed = self.post("execute", encode(step))
        return self._executed

    def logits(self) -> Callable[[], torch.Tensor]:
        """Return a function that returns float32[rows, vocab] of the step executed last, once it is read."""
        answer = self._executed

        def get() -> torch.Tensor:
            data, shape = self.wait(answer)[self.output]
            return torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape).copy())

        return get

    def sample_tokens(self, grammar: GrammarOutput | None) -> "Handle":
        return Handle(self, self.post("sample"))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self.post("masks", encode(grammar))

    def release(self, slots: NDArray[np.int32]) -> None:
        self.call("release", slots.tobytes())


@dataclass(frozen=True)
class Handle:
    is_done = False
    group: RankGroup
    answer: RankAnswers

    def get(self) -> ModelRunnerOutput:
        """Return the output rank's result; the other ranks have none."""
        answers = self.group.wait(self.answer)
        assert [i for i, answer in enumerate(answers) if answer is not None] == [self.group.output]
        return msgspec.msgpack.decode(answers[self.group.output], type=ModelRunnerOutput)


class GroupDriver(RunnerDriver):
    """A driver of a whole group."""

    runner: RankGroup

    def __init__(self, group: RankGroup, model: Path, **options: Any) -> None:
        super().__init__(model, runner=group, **options)

    def pending_logits(self) -> Callable[[], torch.Tensor]:
        return self.runner.logits()
