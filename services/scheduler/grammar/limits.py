"""Limits on the cost of a grammar. A grammar that exceeds one is refused with a reason; most limits are checked before
llguidance reads the grammar."""

from llguidance import LLParserLimits

MAX_DEPTH = 64
"""Levels of nesting: of a schema, of parentheses in a regular expression, of brackets in a grammar."""
MAX_SCHEMA_NODES = 20_000
"""Values in a schema, including its keywords."""
MAX_ALTERNATIVES = 5_000
"""Values in all enumerations of a schema together, or number of choices."""
MAX_OPTIONAL_PROPERTIES = 2_500
"""Optional properties of one object in a schema. A mask at a place where each of them may follow takes some 60 ms."""
MAX_ROW_ITEMS = 12_000
"""Alternatives that llguidance follows at one place of the output; an optional property is four."""
MAX_STEP_ITEMS = 2_000_000
"""Alternatives that llguidance follows to make one mask."""
MAX_MINIMUM_SIZE = 1 << 20
"""Greatest `minLength`, `minItems` or `minProperties`; no context is as long."""
MAX_REGEX_ATOMS = 20_000
"""Characters and classes of a regular expression with its counted repetitions written out."""
MAX_TAGS = 128
"""Structural tags of one request."""

CPU_SECONDS = 2
"""Processor time of one trial. The kernel counts whole seconds and may allow one more."""
WALL_SECONDS = 30.0
"""Duration of one trial. `CPU_SECONDS` ends one that computes, so this is for one that hangs: on a busy machine two
seconds of a processor may take long, and a harmless grammar must not be refused for that."""
SETUP_SECONDS = 60.0
"""Duration until a trial process has read the tokenizer."""
MEMORY_BYTES = 512 << 20
"""Memory of one trial in addition to the tokenizer."""
STACK_BYTES = 4 << 20
"""Stack of a trial. The compile threads of the scheduler have more, so a grammar that passed its trial fits there."""
MAX_FILL_SECONDS = 0.25
"""Processor time to fill one mask. A trial that exceeds it is refused; later, the request fails."""
TRIAL_STEPS = 48
"""Tokens that a trial generates to measure the cost of a mask."""

CACHE_BYTES = 256 << 20
"""Estimated size of all compiled grammars that are kept."""
MAX_WAITING = 256
"""Grammars that wait to be compiled."""
WAITING_SECONDS = 30.0
"""Longest wait of a grammar until its compilation starts."""
NUM_THREADS = 2
"""Grammars compiled at once, so that one slow grammar does not delay all others."""

MAX_WHITESPACE = 8
"""Consecutive whitespace tokens between two parts of a JSON output."""


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits. They count work, so that every machine accepts the same grammars.

    Those of alternatives are higher than its defaults. Two are lower: expressions (`initial_lexer_fuel`) and lexer
    states take about 1 KB each, which all requests with the same grammar share.
    """
    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_max_items=MAX_STEP_ITEMS,
        initial_lexer_fuel=200_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
