"""Structured output: compiles the grammar that a request's output must match, and fills its token masks step by step.

The core depends on `Grammar`, `Compiler` and `MaskMaker` alone. The implementation:

    compiler.py     GrammarCompiler: requests enter here, compiled grammars leave
    cache.py        the compiled grammars that are kept
    matcher.py      Matcher: the `Grammar` of one request
    translate/      from the text of a request to a grammar of llguidance, with checks of depth and size
    trial/          a separate process that compiles a grammar first, under limits of time and memory
    masks.py        InlineMaskMaker, MaskThread: where masks are made
    limits.py       every limit, with its unit
"""

from services.scheduler.grammar.base import NOT_NOW, Compiler, Grammar, MaskMaker
from services.scheduler.grammar.masks import INLINE_MASKS, InlineMaskMaker, Masks
