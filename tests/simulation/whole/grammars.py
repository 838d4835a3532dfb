"""The scheduler's grammar compiler and its thread for masks, on the virtual clock."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar import Grammar, Masks
from tests.simulation.grammar import Automaton, Compilation, LateMasks
from tests.simulation.whole.device import VOCAB
from tests.simulation.whole.hub import Killed
from tests.simulation.whole.network import SimulatedNetwork, Wakeup


class LethalAutomaton(Automaton):
    """A grammar that crashes the process which makes its masks, once it has accepted some tokens."""

    crash: Callable[[], NoReturn]
    tokens_left: int

    def accept(self, token_id: int) -> bool:
        self.tokens_left -= 1
        return super().accept(token_id)

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self.tokens_left <= 0:
            self.crash()
        super().fill(mask)


class SimulatedCompiler:
    """The scheduler's grammar compiler, with automata in place of grammars. Each takes some virtual time.

    Args:
        lethal: texts of grammars that crash the scheduler, with the number of tokens after which they do.
        crash: ends the scheduler's process.
    """

    def __init__(self, network: SimulatedNetwork, lethal: Mapping[str, int], crash: Callable[[], NoReturn]) -> None:
        self._network, self._wakeup = network, Wakeup(network)
        self._lethal, self._crash = lethal, crash
        self._compilation = Compilation(VOCAB)
        self._ready: deque[tuple[int, Automaton | str]] = deque()

    def submit(
        self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...], again: bool = False
    ) -> None:
        self._compilation.submit(ticket, params, eos_token_ids)
        self._network.hub.after(self._network.rng.choice((0.001, 0.05, 0.5)), partial(self._finish, ticket))

    def _finish(self, ticket: int) -> None:
        params, eos = self._compilation.waiting[ticket]
        grammar = self._compilation.finish(ticket)
        if (tokens := self._lethal.get(params.text)) is not None:
            grammar = LethalAutomaton.from_params(params, VOCAB, eos)
            grammar.crash, grammar.tokens_left = self._crash, tokens
        self._ready.append((ticket, grammar))
        self._wakeup.put()

    def cancel(self, ticket: int) -> None:
        """The result arrives all the same."""

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def take(self) -> list[tuple[int, Automaton | str]]:
        self._wakeup.inbox.clear()
        ready, self._ready = list(self._ready), deque()
        return ready

    def set_vocab_size(self, size: int) -> None:
        assert size == VOCAB

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class SimulatedMaskThread:
    """The scheduler's thread for masks.

    Args:
        seconds: each takes one of these.
    """

    late = True

    def __init__(self, network: SimulatedNetwork, seconds: tuple[float, ...]) -> None:
        self._network, self._seconds, self._wakeup = network, seconds, Wakeup(network)
        self._masks = LateMasks()
        self._made: deque[tuple[int, Masks]] = deque()

    def submit(self, ticket: int, grammar: Grammar, draft_ids: list[int], num_words: int) -> Masks | None:
        self._masks.submit(ticket, grammar, draft_ids, num_words)
        seconds = self._network.rng.choice(self._seconds)
        self._network.hub.after(seconds, partial(self._finish, ticket))
        return None

    def _finish(self, ticket: int) -> None:
        try:
            self._made.append((ticket, self._masks.finish(ticket)))
        except Killed:
            return
        self._wakeup.put()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def take(self) -> list[tuple[int, Masks]]:
        self._wakeup.inbox.clear()
        made, self._made = list(self._made), deque()
        return made

    def close(self) -> None:
        pass
