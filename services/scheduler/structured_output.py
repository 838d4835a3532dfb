"""Grammars and masks that threads beside the loop make, on their way into the core."""

import time
from collections import deque
from collections.abc import Callable

from services.scheduler.core.engine import EngineCore
from services.scheduler.grammar import Grammar
from services.scheduler.grammar.compiler import GrammarCompiler
from services.scheduler.grammar.masks import MaskThread
from services.scheduler.worker_seconds import WorkerSeconds

GRAMMAR_SECONDS = 0.01
"""Seconds of one turn after which compiled grammars wait for the next one. Each is given the tokens delivered before, a
million in 1 to 2 s."""
MASK_PATIENCE = 5e-4
"""Seconds that the loop waits for masks after it has submitted some, so that they are sent before the next plan."""
MASK_SHARE = 1 / 3
"""Share of a forward pass for which the loop waits for masks that are made fast. If it formed the plan meanwhile, it
would keep the interpreter's lock from the thread that makes them; the plan is due only when the pass ends."""


class StructuredOutput:
    def __init__(self, compiler: GrammarCompiler | None, mask_thread: MaskThread | None) -> None:
        """
        Args:
            compiler: None: structured output is refused.
            mask_thread: None: masks are made in the loop.
        """
        self.compiler, self.mask_thread = compiler, mask_thread
        self.grammars = deque[tuple[int, Grammar | str]]()
        """Compiled, by ticket, and not taken by the core yet."""

    @property
    def fds(self) -> list[int]:
        """File descriptors, one of which is readable when there is something to `read`."""
        return [maker.fileno() for maker in (self.compiler, self.mask_thread) if maker is not None]

    def read(self, engine: EngineCore, worker_seconds: WorkerSeconds, send: Callable[[], None]) -> None:
        """Give the core what is made. Call it in each turn of the loop; `send` sends everything that is to be sent."""
        if self.compiler is not None:
            self.grammars += self.compiler.take()
            ends = time.monotonic() + GRAMMAR_SECONDS
            while self.grammars:
                ticket, grammar = self.grammars.popleft()
                if engine.store.compiling.replay(ticket, grammar):
                    engine.on_grammar(ticket, grammar)
                else:
                    self.grammars.append((ticket, grammar))
                if time.monotonic() >= ends:
                    break
        if self.mask_thread is not None:
            needed = self.mask_thread.seconds_needed
            if needed and not worker_seconds.arrives_in_time(time.monotonic() + needed):
                send()  # they come too late for the step in flight, and the next plan need not
            most = max(MASK_PATIENCE, MASK_SHARE * worker_seconds.last_forward)
            self.mask_thread.wait(MASK_PATIENCE, most)
            for ticket, masks in self.mask_thread.take():
                engine.on_masks(ticket, masks)

    def close(self) -> None:
        for maker in (self.mask_thread, self.compiler):
            if maker is not None:
                maker.close()
