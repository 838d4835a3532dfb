"""The parent's side of simulated ranks: processes that are reused, an epoch after the other."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from protocol.codec import encode
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from tests.ranks import sim_rank
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, SLOTS, VOCAB

PATIENCE = 60.0
COST = {"sim_step_ms": 0.0, "sim_prefill_token_us": 0.0}


class RankError(Exception):
    """What a rank raised, with its type in front."""


class RankProcess:
    """Requests leave at once; answers are read in the same order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=sim_rank.serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._unanswered = 0

    def ask(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))
        self._unanswered += method != "abort"

    def answer(self) -> Any:
        """Raises: RankError"""
        assert self._connection.poll(PATIENCE), "the rank says nothing"
        kind, value = self._connection.recv()
        self._unanswered -= 1
        if kind != "ok":
            raise RankError(f"{kind}: {value}")
        return value

    def last_answer(self) -> Any:
        """After those of all requests before. Raises: RankError, the first one"""
        error = value = None
        while self._unanswered:
            try:
                value = self.answer()
            except RankError as raised:
                error = error or raised
        if error:
            raise error
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.last_answer()

    def close(self) -> None:
        self._connection.close()
        self._process.join(PATIENCE)
        self._process.close()


class SimGroup:
    """`tp` * `pp` of the processes; `config` are settings of the worker, `frozen`: time stands still."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        tp: int,
        pp: int,
        frozen: bool = False,
        speculation: Speculation | None = None,
        **config: Any,
    ) -> None:
        self.tp, self.pp, self._speculation = tp, pp, speculation
        self.ranks = list(processes[: tp * pp])
        for rank in self.ranks:
            rank.call("start", {"sim_vocab_size": VOCAB, **COST, **config}, frozen)
        self.join(epoch=1)

    def join(self, epoch: int) -> None:
        tp, pp = self.tp, self.pp
        rendezvous = self.ranks[0].call("listen")
        for number, rank in enumerate(self.ranks):
            assignment = Assignment(
                epoch, number, tp * pp, BLOCK, SLOTS, 512, CONTEXT, tp, pp, rendezvous if tp * pp > 1 else "",
                self._speculation,
            )  # fmt: skip
            rank.ask("load", assignment, InitializeCache(BLOCKS, CONTEXT))
        for rank in self.ranks:
            rank.last_answer()

    @property
    def output(self) -> RankProcess:
        return self.ranks[(self.pp - 1) * self.tp]

    def stage(self, number: int) -> RankProcess:
        """Its first rank."""
        return self.ranks[number * self.tp]

    def launch(self, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> None:
        """Both calls of a step on all ranks; nobody is waited for."""
        for rank in self.ranks:
            self.launch_on(rank, plan, grammar)

    @staticmethod
    def launch_on(rank: RankProcess, plan: SchedulerOutput, grammar: GrammarOutput | None = None) -> None:
        rank.ask("execute", encode(plan))
        rank.ask("sample", encode(grammar) if grammar else None)

    def results(self) -> list[ModelRunnerOutput]:
        """Of all steps launched since the last call. Raises: RankError"""
        for rank in self.ranks:
            rank.ask("results")
        results = {rank: rank.last_answer() for rank in self.ranks}
        reported = results.pop(self.output)
        assert all(isinstance(result, StepTimes) for others in results.values() for result in others)
        return reported

    def errors(self) -> list[str]:
        """One per rank, "" where all went well; of all requests until now."""
        texts = []
        for rank in self.ranks:
            try:
                rank.last_answer()
            except RankError as error:
                texts.append(str(error))
            else:
                texts.append("")
        return texts

    def abort(self) -> None:
        for rank in self.ranks:
            rank.ask("abort")

    def leave(self) -> None:
        """Also after an error."""
        self.abort()
        self.errors()
        for rank in self.ranks:
            rank.call("leave")


MakeGroup = Callable[..., SimGroup]
_POOL = pytest.StashKey[list[RankProcess]]()


def _processes(session: pytest.Session, count: int) -> list[RankProcess]:
    """They last as long as the session: starting one means to import torch."""
    if _POOL not in session.stash:
        session.stash[_POOL] = []
        session.addfinalizer(lambda: [process.close() for process in session.stash[_POOL]])
    pool = session.stash[_POOL]
    pool += [RankProcess() for _ in range(count - len(pool))]
    return pool


@pytest.fixture(name="make_group")
def group_fixture(request: pytest.FixtureRequest) -> Iterator[MakeGroup]:
    """Groups in processes of their own; one at a time."""
    with ExitStack() as stack:

        def make(tp: int, pp: int, **options: Any) -> SimGroup:
            group = SimGroup(_processes(request.session, tp * pp), tp, pp, **options)
            stack.callback(group.leave)
            return group

        yield make
