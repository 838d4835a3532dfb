"""What a grammar may cost. What exceeds a limit here is refused by name, most of it before the library sees it."""

from llguidance import LLParserLimits

MAX_DEPTH = 64
"""Levels of nesting: of a schema, of parentheses in a regular expression, of brackets in a grammar."""
MAX_SCHEMA_NODES = 20_000
"""Values in a schema, its own keywords among them."""
MAX_ALTERNATIVES = 5_000
"""Values in all enumerations of a schema together, or choices."""
MAX_LEAST = 1 << 20
"""Characters, items or properties that a value may be made to have at least: no context would hold more."""
MAX_REGEX_ATOMS = 20_000
"""Characters and classes of a regular expression with its counted repetitions written out."""
MAX_TAGS = 128
"""Structural tags of one request."""

CPU_SECONDS = 2
"""Processor time of one trial; the kernel counts whole seconds and may give one more."""
WALL_SECONDS = 8.0
"""Time of one trial, on a machine that is busy with other things."""
SETUP_SECONDS = 60.0
"""Time until a trial process has read the tokenizer."""
MEMORY_BYTES = 512 << 20
"""Memory of one trial beyond what the tokenizer takes."""
STACK_BYTES = 4 << 20
"""Stack of a trial; what recurses too deeply for it never comes to the scheduler, whose threads have more."""
MAX_FILL_SECONDS = 0.25
"""Processor time to find out what may come next, once. Who needs more is refused, or ended if that shows only later."""
TRIAL_STEPS = 48
"""Tokens that a trial generates to see what they cost."""

CACHE_BYTES = 256 << 20
"""Compiled grammars that are kept, by estimate."""
MAX_WAITING = 256
"""Grammars waiting to be compiled."""
WAITING_SECONDS = 30.0
"""Longest wait of one of them for its turn."""
LANES = 2
"""Grammars compiled at once, so that a bad one does not hold up all others."""

MAX_WHITESPACE = 8
"""Tokens in a row that may be nothing but whitespace between two parts of a JSON answer."""


def parser_limits() -> LLParserLimits:
    """The library's own: all but two at their default. Expressions (`initial_lexer_fuel`) and lexer states, at about
    1 KB each, are memory that all requests with this grammar share."""
    return LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)
