"""Grammars and masks that threads beside the loop make, on their way into the core."""

import logging
import time
from collections import deque
from typing import Self

from services.checkpoint import CheckpointError, text_digest
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.grammar import Grammar
from services.scheduler.grammar.compiler import GrammarCompiler
from services.scheduler.grammar.masks import MaskThread
from services.scheduler.grammar.matcher import MatcherBatch
from services.scheduler.grammar.vocabulary import GrammarVocabulary

log = logging.getLogger("runahead.scheduler")

GRAMMAR_SECONDS = 0.01
"""Seconds of one turn after which compiled grammars wait for the next one. Each is given the tokens delivered before, a
million in 1 to 2 s."""


class StructuredOutput:
    def __init__(self, compiler: GrammarCompiler | None, mask_thread: MaskThread | None, tokenizer: str = "") -> None:
        """
        Args:
            compiler: None: structured output is refused.
            mask_thread: None: masks are made in the loop.
            tokenizer: digest of the tokenizer.json that grammars are compiled for; "": there is none.
        """
        self.compiler, self.mask_thread, self.tokenizer = compiler, mask_thread, tokenizer
        self.grammars = deque[tuple[int, Grammar | str]]()
        """Compiled, by ticket, and not taken by the core yet."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Load the model's tokenizer. Without one structured output is refused, and everything else is served."""
        mask_thread = MaskThread(MatcherBatch().fill)
        try:
            vocabulary = GrammarVocabulary.load(config.model, config.revision, config.tokenizer)
        except CheckpointError as error:
            log.warning("structured output is not served: %s", error)
            return cls(None, mask_thread)
        compiler = GrammarCompiler(vocabulary)
        if vocabulary.width:  # now, while the workers start, instead of when they are ready
            compiler.set_vocab_size(vocabulary.width)
        return cls(compiler, mask_thread, text_digest(vocabulary.text))

    @property
    def fds(self) -> list[int]:
        """File descriptors, one of which is readable when there is something to `read`."""
        return [maker.fileno() for maker in (self.compiler, self.mask_thread) if maker is not None]

    def read(self, engine: EngineCore) -> None:
        """Give the core what is made. Call it in each turn of the loop, before the next plan is formed."""
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
            for ticket, masks in self.mask_thread.take():
                engine.on_masks(ticket, masks)

    def close(self) -> None:
        for maker in (self.mask_thread, self.compiler):
            if maker is not None:
                maker.close()
