"""Rules on logits under Triton's interpreter against the reference, bit for bit."""

import numpy as np
import torch

from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules
from tests.unit.native.cuda.kernel_cases import Accuracy, KernelMaker

VOCAB, SLOTS, LIMIT, PROMPT = 1100, 9, 40, 5


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


RULES = [
    None,
    LogitRule(PROMPT, penalizes=True, repetition=1.37),
    LogitRule(PROMPT, penalizes=True, frequency=1.3, presence=-0.7),
    LogitRule(PROMPT, penalizes=True, repetition=0.01, frequency=-2.0, presence=2.0),
    LogitRule(PROMPT, biased=i32(0, VOCAB - 1, 17), biases=np.array([2.5, -3.0, 100.0], np.float32)),
    LogitRule(PROMPT, allowed=i32(0, 5, 9, 64, VOCAB - 1)),
    LogitRule(PROMPT, bad_words=(i32(0), i32(3, 1), i32(1, 2, 3), i32(2, 2, 2, 7), i32(*[1] * 35, 9))),
    LogitRule(PROMPT, banned=i32(0, 12), banned_until=12),
    LogitRule(
        PROMPT, allowed=i32(*range(0, VOCAB, 2)), bad_words=(i32(4), i32(2, 8)), banned=i32(6), banned_until=50,
        biased=i32(6, 10), biases=np.array([3.0, 1.0], np.float32), penalizes=True, repetition=1.2, presence=0.4,
    ),
]  # fmt: skip


def apply_to_both(
    make: KernelMaker, slots: np.ndarray, positions: np.ndarray, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    history = torch.from_numpy(rng.integers(0, 4, (SLOTS, LIMIT)).astype(np.int32))
    results = []
    for rules in (make().sampling.logit_rules(SLOTS, VOCAB, history), LogitRules(SLOTS, VOCAB, history)):
        for slot, rule in enumerate(RULES):
            rules.assign(slot, rule)
        logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (len(slots), VOCAB)).astype(np.float32))
        assert rules.changes(slots).tolist() == [RULES[slot] is not None for slot in slots]
        for _ in range(2):  # nothing of a step is left for the next one
            rules.apply(logits, slots, positions)
        results.append(logits)
    return results[0], results[1]


def test_every_rule_equals_the_reference(make: KernelMaker, accuracy: Accuracy) -> None:
    """At the end of the prompt, and after many tokens."""
    slots = np.arange(SLOTS, dtype=np.int32)[::-1].copy()
    for seed, position in enumerate((PROMPT, 11, LIMIT)):
        ours, theirs = apply_to_both(make, slots, np.full(SLOTS, position, np.int32), seed)
        torch.testing.assert_close(ours, theirs, **accuracy.exact)


def test_rows_of_a_slot_count_the_drafts_before_them(make: KernelMaker, accuracy: Accuracy) -> None:
    slots, positions = i32(3, 3, 3, 6, 6, 8, 8), i32(9, 10, 11, 20, 21, 7, 8)
    ours, theirs = apply_to_both(make, slots, positions, 3)
    torch.testing.assert_close(ours, theirs, **accuracy.exact)


def test_no_rule_and_no_rows(make: KernelMaker, accuracy: Accuracy) -> None:
    for slots in (i32(0), i32()):
        ours, theirs = apply_to_both(make, slots, slots + np.int32(7), 0)
        torch.testing.assert_close(ours, theirs, **accuracy.exact)


def test_a_position_without_a_token_is_no_index(make: KernelMaker) -> None:
    """The host does not wait for the device, so it does not raise."""
    history = torch.full((SLOTS, LIMIT), -1, dtype=torch.int32)
    history[1, :3] = torch.tensor([5, VOCAB, 5])
    rules = make().sampling.logit_rules(SLOTS, VOCAB, history)
    rules.assign(1, LogitRule(0, penalizes=True, presence=1.0))
    logits = torch.zeros(1, VOCAB)
    rules.apply(logits, i32(1), i32(9))
    assert logits.nonzero().tolist() == [[0, 5]]
