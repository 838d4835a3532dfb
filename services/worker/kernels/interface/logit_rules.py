"""Changes of logits by the parameters of a request."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import F32, I32
from services.worker.sampling import reference


@dataclass(frozen=True)
class LogitRule:
    """Changes of one request's logits by its parameters, in this order; ids are in the vocabulary."""

    num_prompt: int
    allowed: I32 | None = None
    """Ascending; None: all."""
    bad_words: tuple[I32, ...] = ()
    banned: I32 | None = None
    """Not sampled below position `banned_until`."""
    banned_until: int = 0
    biased: I32 | None = None
    biases: F32 | None = None
    penalizes: bool = False
    """True: the next three have an effect."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class LogitRules:
    """The rule of every slot. Tokens are counted in the history when a row is sampled (penalty history)."""

    def __init__(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> None:
        self._vocab, self._history = vocab_size, history
        self._rules: list[LogitRule | None] = [None] * num_slots
        self._has_rule = np.zeros(num_slots, np.bool_)

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        """Set the rule of a slot's new request; None: no rule."""
        self._rules[slot], self._has_rule[slot] = rule, rule is not None

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        """Return the rows whose logits `apply` may change, bool[rows]."""
        return self._has_rule[slots]

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        """Change float32[rows, vocab] in place. `positions` are those of the tokens to sample. The rows of a slot are
        adjacent and their positions consecutive: all but the first follow drafts.

        Raises: RuntimeError, if a position before them has no token (valid ids).
        """
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if (rule := self._rules[slot]) is not None:  # what it looks at is counted anew for every row
                tokens = self._history[slot, :position].numpy()
                if rule.penalizes and ((tokens < 0) | (tokens >= self._vocab)).any():
                    raise RuntimeError(f"slot {slot} is sampled, but not all positions before have a token")
                _change(logits[row].numpy(), rule, tokens, position)


def _change(row: NDArray[np.float32], rule: LogitRule, tokens: I32, position: int) -> None:
    """In place; `tokens` are all before the position."""
    prompt, output = tokens[: rule.num_prompt], tokens[rule.num_prompt :]
    if rule.allowed is not None:
        reference.allow_only(row, rule.allowed)
    words = tuple(tuple(word.tolist()) for word in rule.bad_words)
    reference.forbid(row, reference.ends_of_bad_words(words, output))
    if rule.banned is not None and position < rule.banned_until:
        reference.forbid(row, tuple(rule.banned.tolist()))
    if rule.biased is not None and rule.biases is not None:
        reference.add_bias(row, tuple(zip(rule.biased.tolist(), rule.biases.tolist(), strict=True)))
    if rule.penalizes:
        reference.penalize(row, prompt, output, rule.repetition, rule.frequency, rule.presence)
