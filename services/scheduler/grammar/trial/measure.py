"""Compilation of one grammar in the trial process, and measurement of its cost."""

import ctypes
import random
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar.errors import GrammarError, from_library, too_complex
from services.scheduler.grammar.limits import MAX_FILL_SECONDS, TRIAL_STEPS, parser_limits
from services.scheduler.grammar.translate import KIND_NAMES, translate


class TrialVerdict(msgspec.Struct, array_like=True, frozen=True):
    """Result of a trial. It answers a `StructuredOutputParams`, and the `GrammarVocabulary` before them."""

    error: str = ""
    """Reason of a refusal, for the client. Empty: the grammar can be served."""
    grammar: str = ""
    """llguidance's grammar."""
    num_bytes: int = 0
    """Memory of the compiled grammar with its first mask."""
    growth: int = 0
    """Bytes that a short output added: states of the lexer, which all copies share."""


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class TrialCompiler:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        opening = (tokenizer.tokenize_str(text) for text in ('{"', "{", '"'))
        self._opening = [tokens[0] for tokens in opening if len(tokens) == 1]
        """Tokens that lead into JSON objects, and to the ends of names and strings."""
        self._mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
        """Exists in glibc only; elsewhere the size is estimated from the length of the grammar."""
        if self._mallinfo is not None:
            self._mallinfo.restype = _MallocInfo

    def verdict(self, params: StructuredOutputParams) -> TrialVerdict:
        try:
            return self._compile(params)
        except GrammarError as error:
            return TrialVerdict(str(error))
        except (MemoryError, RecursionError):
            return TrialVerdict(str(too_complex(KIND_NAMES[params.kind])))

    def _compile(self, params: StructuredOutputParams) -> TrialVerdict:
        """Raises: GrammarError"""
        what = KIND_NAMES[params.kind]
        grammar = translate(params, self._is_special)
        before = self._heap_bytes()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise from_library(what, matcher.get_error())
        compiled = self._generate(matcher.deep_copy(), what, 1)
        self._generate(matcher.deep_copy(), what, TRIAL_STEPS)
        self._generate(matcher.deep_copy(), what, TRIAL_STEPS, self._opening)
        size = max(compiled - before, 64 * len(grammar), 1 << 14)
        return TrialVerdict("", grammar, size, max(self._heap_bytes() - compiled, 1 << 12))

    def _generate(self, matcher: LLMatcher, what: str, max_tokens: int, preferred: Sequence[int] = ()) -> int:
        """Generate a random output and check the cost of each mask. Return the heap's size afterwards, in bytes.

        Args:
            preferred: tokens that are taken where they are allowed, the first one before the others.

        Raises: GrammarError, if nothing matches or a mask costs too much.
        """
        mask = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), np.int32)
        draws = random.Random(0)  # noqa: S311  equal grammars get equal verdicts
        for _ in range(max_tokens):
            started = time.thread_time()
            fill_next_token_bitmask(matcher, mask)
            if matcher.is_error():
                raise from_library(what, matcher.get_error())
            if time.thread_time() - started > MAX_FILL_SECONDS:
                raise too_complex(what)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                raise GrammarError(f"nothing can match the {what}")
            if matcher.is_stopped():
                break
            drawn = int(allowed[draws.randrange(len(allowed))])
            token = next((token for token in preferred if token in allowed), drawn)
            if not matcher.consume_token(token):
                raise from_library(what, matcher.get_error())
        return self._heap_bytes()

    def _is_special(self, text: str) -> bool:
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0])

    def _heap_bytes(self) -> int:
        """Return the bytes in use. All are in one arena, because MALLOC_ARENA_MAX is 1."""
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)
