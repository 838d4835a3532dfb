"""The parent's side of simulated ranks: processes that serve one group, and one epoch, after the other."""

import select
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from protocol.codec import encode
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from tests.ranks.failures import RankFailure
from tests.ranks.group import NativeRankProcess
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, SLOTS, VOCAB

COST = {"sim_step_ms": 0.0, "sim_prefill_token_us": 0.0}


class SimRankProcess(NativeRankProcess):
    """A simulated rank in a process. Commands leave at once; answers are read in the same order."""

    code = "from tests.ranks.sim_rank import main; main()"

    def __init__(self) -> None:
        super().__init__()
        self._unanswered = 0

    def send(self, name: str, *arguments: Any) -> None:
        super().send(name, arguments[0] if len(arguments) == 1 else arguments or None)
        self._unanswered += name != "abort"

    def receive(self) -> Any:
        self._unanswered -= 1
        return super().receive()

    def read_answers(self) -> None:
        """Read the answers that have arrived, so that they do not fill the pipe.

        Raises: RankFailure
        """
        while self._unanswered and select.select([self.stdout], [], [], 0)[0]:
            self.receive()

    def last_answer(self) -> Any:
        """Read all answers and return the last one.

        Raises: RankFailure, the first of several.
        """
        failure = value = None
        while self._unanswered:
            try:
                value = self.receive()
            except RankFailure as raised:
                failure = failure or raised
        if failure:
            raise failure
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.last_answer()


class SimGroup:
    """`tp` * `pp` ranks in processes.

    Args:
        virtual: on a virtual clock.
        config: settings of the workers.
    """

    def __init__(
        self,
        processes: Sequence[SimRankProcess],
        tp: int,
        pp: int,
        virtual: bool = False,
        speculation: Speculation | None = None,
        **config: Any,
    ) -> None:
        self.tp, self.pp, self._speculation = tp, pp, speculation
        self.ranks = list(processes[: tp * pp])
        self.times: dict[SimRankProcess, list[StepTimes]] = {}
        """Times of the steps that `results` returned last, on the ranks beside the output rank."""
        for rank in self.ranks:
            rank.call("open", {"sim_vocab_size": VOCAB, **COST, **config}, virtual)
        self.join(epoch=1)

    def join(self, epoch: int) -> None:
        tp, pp = self.tp, self.pp
        rendezvous = self.ranks[0].call("listen")
        for number, rank in enumerate(self.ranks):
            assignment = Assignment(
                epoch, number, tp * pp, BLOCK, SLOTS, 512, CONTEXT, tp, pp, rendezvous if tp * pp > 1 else "",
                self._speculation,
            )  # fmt: skip
            rank.send("load", encode(assignment))
            rank.send("cache", encode(InitializeCache(BLOCKS, CONTEXT)))
        for rank in self.ranks:
            rank.last_answer()

    @property
    def output(self) -> SimRankProcess:
        """The output rank."""
        return self.ranks[(self.pp - 1) * self.tp]

    def stage(self, number: int) -> SimRankProcess:
        """Return the first rank of a stage."""
        return self.ranks[number * self.tp]

    def launch(self, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> None:
        """Send both calls of a step to all ranks, without waiting."""
        for rank in self.ranks:
            self.launch_on(rank, plan, grammar)

    @staticmethod
    def launch_on(rank: SimRankProcess, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> None:
        rank.send("execute", encode(plan))
        rank.send("sample", encode(grammar) if grammar else None)

    def results(self) -> list[ModelRunnerOutput]:
        """Return the results of all steps launched since the last call.

        Raises: RankFailure
        """
        for rank in self.ranks:
            rank.send("results")
        results = {rank: rank.last_answer() for rank in self.ranks}
        reported = results.pop(self.output)
        self.times = {
            rank: [msgspec.msgpack.decode(times, type=StepTimes) for times in others]
            for rank, others in results.items()
        }
        return [msgspec.msgpack.decode(result, type=ModelRunnerOutput) for result in reported]

    def errors(self) -> list[str]:
        """Read all answers. Return the failure of each rank, "" without one."""
        texts = []
        for rank in self.ranks:
            try:
                rank.last_answer()
            except RankFailure as failure:
                texts.append(str(failure))
            else:
                texts.append("")
        return texts

    def abort(self) -> None:
        for rank in self.ranks:
            rank.send("abort")

    def leave(self) -> None:
        """End the group, also after an error."""
        self.abort()
        self.errors()
        for rank in self.ranks:
            rank.call("leave")


MakeGroup = Callable[..., SimGroup]
_POOL = pytest.StashKey[list[SimRankProcess]]()


def session_processes(session: pytest.Session, count: int) -> list[SimRankProcess]:
    """Return processes that last as long as the session: each start imports torch."""
    if _POOL not in session.stash:
        session.stash[_POOL] = []
        session.addfinalizer(lambda: [(process.end(), process.wait()) for process in session.stash[_POOL]])
    pool = session.stash[_POOL]
    pool += [SimRankProcess() for _ in range(count - len(pool))]
    return pool
