"""Every rule on logits against the reference sampler in float32, bit for bit, whatever else is in the batch (penalty
history, docs/invariants.md)."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from protocol.codec import ProtocolError
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput, NewRequest, SchedulerOutput
from services.worker.backends.native.sampling.sampler import SampledTokens, Sampler
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from services.worker.kernels.cpu.logit_rules import CpuLogitRules
from services.worker.sampling.reference import adjusted
from tests.unit.native.implementations import IMPLEMENTATIONS, make, scores_of

VOCAB, SLOTS, LIMIT = 131, 24, 64
LAST = VOCAB - 1


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **values})


def bitmask(*rows: set[int]) -> bytes:
    bits = np.zeros((len(rows), -(-VOCAB // 32) * 32), np.uint8)
    for row, allowed in enumerate(rows):
        bits[row, list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def expected_row(
    logits: torch.Tensor, wanted: SamplingParams, prompt: list[int], output: list[int], allowed: set[int] | None = None
) -> np.ndarray:
    """`allowed`: by a grammar."""
    mask = None if allowed is None else np.frombuffer(bitmask(allowed), np.int32)
    return adjusted(logits.numpy(), wanted, np.array(prompt, np.int32), np.array(output, np.int32), mask)


class SampledBatch:
    """A sampler whose rows come with logits of their own, beside what every request has said."""

    def __init__(self, implementation: str, vocab: int = VOCAB) -> None:
        self.vocab, self.steps = vocab, 0
        self.table = SlotTable(SLOTS, 16, SLOTS * LIMIT, LIMIT)
        kernels = make(implementation)
        self.history = TokenHistory(SLOTS, LIMIT, vocab, kernels)
        self.history.tokens.fill_(-1)  # what was not written is no token
        self.sampler = Sampler(self.table, self.history, vocab, kernels)
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}

    def add(self, slot: int, prompt: list[int], wanted: SamplingParams, output: list[int] | None = None) -> None:
        """New, or resumed with `output`; whoever had the slot has left it."""
        released = i32(slot) if slot in self.prompts else b""
        self.prompts[slot], self.outputs[slot] = prompt, list(output or [])
        tokens = prompt + self.outputs[slot]
        blocks = np.arange(slot * 4, slot * 4 + 4, dtype=np.int32).tobytes()
        self.steps += 1
        request = NewRequest(slot, self.steps, i32(*tokens), len(prompt), blocks, wanted)
        self.table.apply(SchedulerOutput(1, self.steps, b"", b"", b"", b"", b"", new=[request], released=released))
        self.history.assign(request)
        self.sampler.assign(slot)

    def sample(
        self, slots: list[int], logits: torch.Tensor, grammar: GrammarOutput | None = None
    ) -> tuple[torch.Tensor, SampledTokens]:
        """The logits as they were left, and the result."""
        at = np.array([len(self.prompts[slot]) + len(self.outputs[slot]) for slot in slots], np.int32)
        logits, rows = logits.clone(), np.array(slots, np.int32)
        result = self.sampler.sample(logits, rows, at, grammar)
        self.history.append(rows, at, result.ids)
        for slot, token in zip(slots, result.ids.tolist(), strict=True):
            self.outputs[slot].append(token)
        return logits, result


NewBatch = Callable[..., SampledBatch]


@pytest.fixture(params=IMPLEMENTATIONS)
def new_batch(request: pytest.FixtureRequest) -> NewBatch:
    return partial(SampledBatch, request.param)


CASES = {
    "frequency": params(frequency_penalty=1.3),
    "frequency-negative": params(frequency_penalty=-2.0),
    "presence": params(presence_penalty=0.7),
    "presence-negative": params(presence_penalty=-1.9),
    "repetition": params(repetition_penalty=1.37),
    "repetition-large": params(repetition_penalty=10.0),
    "repetition-small": params(repetition_penalty=0.01),
    "all-penalties": params(repetition_penalty=1.1, presence_penalty=2.0, frequency_penalty=2.0),
    "zero": params(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0),
    "bias": params(logit_bias=((0, 2.5), (LAST, -3.0), (17, 100.0), (VOCAB, 9.0), (40, -100.0))),
    "allowed": params(allowed_token_ids=i32(0, 5, 9, 64, LAST, VOCAB + 7)),
    "words": params(bad_words=((0,), (LAST,), (3, 4), (5, VOCAB), (VOCAB, 5), (1, 2, 3), (7,) * 30)),
    "min-tokens": params(min_tokens=4, eos_token_ids=(LAST, VOCAB), stop_token_ids=(0, 12)),
    "everything": params(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.4, logit_bias=((8, 3.0),),
        allowed_token_ids=i32(*range(0, VOCAB, 2)), bad_words=((4, 8), (2,)), min_tokens=5, stop_token_ids=(6,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_equals_the_reference_at_every_token(new_batch: NewBatch, name: str) -> None:
    """Alone, and beside requests with all the other rules: the same bits."""
    rng, wanted = np.random.default_rng(1), CASES[name]
    alone, crowd = new_batch(), new_batch()
    for batch in (alone, crowd):
        batch.add(3, [0, LAST, 5, 0, 3], wanted)
    others = {slot + 5: case for slot, case in enumerate(CASES.values())}
    for slot, case in others.items():
        crowd.add(slot, [slot, 4, 8], case)
    visible = False
    for _ in range(40):
        row = torch.tensor(rng.normal(0, 1.5, (1, VOCAB)), dtype=torch.float32)
        row[0, :9] += 2  # so that tokens come again
        rest = torch.tensor(rng.normal(0, 1.5, (len(others), VOCAB)), dtype=torch.float32)
        expected = expected_row(row[0], wanted, alone.prompts[3], alone.outputs[3])
        left, result = alone.sample([3], row)
        among, results = crowd.sample([*others, 3], torch.cat([rest, row]))
        assert left[0].numpy().tobytes() == among[-1].numpy().tobytes() == expected.tobytes()
        assert result.ids[0] == results.ids[-1] == int(expected.argmax())
        visible |= expected.tobytes() != row[0].numpy().tobytes()
    assert visible == (name != "zero")


def test_bad_word_needs_all_its_tokens_in_the_output(new_batch: NewBatch) -> None:
    """The prompt's tokens do not count; neither does a word that the output is too short for."""
    batch, favourite = new_batch(), torch.zeros(1, VOCAB)
    favourite[0, 9], favourite[0, 8] = 5.0, 4.0
    batch.add(0, [9, 9], params(bad_words=((9, 9, 9),)))
    for _ in range(6):
        batch.sample([0], favourite)
    assert batch.outputs[0] == [9, 9, 8, 9, 9, 8]


def test_rules_hold_at_every_draft(new_batch: NewBatch) -> None:
    """The history of a draft is what is confirmed and the drafts before it; counts of rejected ones are taken back."""
    rng, batch = np.random.default_rng(8), new_batch()
    for slot, wanted in enumerate(CASES.values()):
        batch.add(slot, [0, LAST, 5, 0, 3], wanted)
    accepted = 0
    for _ in range(12):
        slots = rng.permutation(len(CASES)).tolist()
        drafts = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in slots]
        number = np.array([len(row) for row in drafts], np.int32)
        logits = torch.tensor(rng.normal(0, 1.5, (len(slots) + sum(number), VOCAB)), dtype=torch.float32)
        logits[:, :9] += 3  # so that drafts hold at times, and tokens come again
        expected, counts = [], []
        for slot, row in zip(slots, drafts, strict=True):
            said, first = batch.outputs[slot], len(expected)
            for j in range(len(row) + 1):
                before = [*said, *row[:j]]
                expected.append(
                    expected_row(logits[len(expected)], list(CASES.values())[slot], batch.prompts[slot], before)
                )
            chosen = [int(each.argmax()) for each in expected[first:]]
            holds = [a == b for a, b in zip(chosen, row, strict=False)]
            counts.append(holds.index(False) + 1 if False in holds else len(chosen))
            for j, token in enumerate(row):
                batch.history.tokens[slot, 5 + len(said) + j] = token
            batch.outputs[slot] = [*said, *chosen[: counts[-1]]]
        at = np.array([5 + len(batch.outputs[slot]) - n for slot, n in zip(slots, counts, strict=True)], np.int32)
        left = logits.clone()
        result = batch.sampler.sample(left, np.array(slots, np.int32), at, drafts=number)
        assert torch.equal(left, torch.from_numpy(np.stack(expected)))
        assert result.counts.tolist() == counts
        tokens = [t for slot, n in zip(slots, counts, strict=True) for t in batch.outputs[slot][-n:]]
        assert result.ids.tolist() == tokens
        for slot in slots:
            tokens = np.array(batch.outputs[slot], np.int32)
            batch.history.tokens.numpy()[slot, 5 : 5 + len(tokens)] = tokens
        accepted += sum(counts) - len(counts)
    assert accepted > 10


def test_a_slot_never_inherits_counts(new_batch: NewBatch) -> None:
    batch, row = new_batch(), torch.zeros(1, VOCAB)
    row[0, 7] = 1.0
    heavy = params(frequency_penalty=2.0)
    batch.add(0, [7], heavy)
    for _ in range(5):
        batch.sample([0], row)
    for wanted in (heavy, params(), heavy):
        batch.add(0, [7], wanted)
        left, _ = batch.sample([0], row)
        assert torch.equal(left, row)


def test_only_slots_with_penalties_cost_memory() -> None:
    batch = SampledBatch("compiled")
    rules = batch.sampler.rules
    assert isinstance(rules, CpuLogitRules)
    for slot in range(SLOTS):
        batch.add(slot, [1, 2], params(logit_bias=((1, 1.0),)) if slot % 2 else params())
    assert rules.counting == 0
    batch.add(4, [1, 2], CASES["presence"])
    assert rules.counting == 1
    batch.add(4, [1, 2], params())
    assert rules.counting == 0


def test_a_position_without_a_token_is_an_error_and_no_index(new_batch: NewBatch) -> None:
    """Valid ids (docs/invariants.md)."""
    batch = new_batch()
    batch.add(6, [1, 2], CASES["frequency"])
    with pytest.raises(RuntimeError, match="slot 6 is sampled, but not all positions before have a token"):
        batch.sampler.sample(torch.zeros(1, VOCAB), np.array([6], np.int32), np.array([4], np.int32))


def test_grammar_comes_after_all_other_rules_and_wins_over_them(new_batch: NewBatch) -> None:
    batch = new_batch()
    forbidden = {40, 64, LAST}
    wanted = {
        2: params(allowed_token_ids=i32(3, 4)),
        5: params(bad_words=((40,), (64,), (LAST,))),
        0: params(logit_bias=((64, 50.0),)),
        9: params(),
        7: params(min_tokens=9, stop_token_ids=(LAST,)),
    }
    grammars = {
        5: forbidden, 0: {*range(32, 64), 96}, 2: forbidden, 7: {LAST}, 8: {1},
    }  # fmt: skip
    for slot, case in wanted.items():
        batch.add(slot, [1], case)
    logits = torch.tensor(np.random.default_rng(4).normal(0, 1, (5, VOCAB)), dtype=torch.float32)
    grammar = GrammarOutput(1, 1, i32(*grammars), bitmask(*grammars.values()))
    left, result = batch.sample(list(wanted), logits, grammar)
    for row, (slot, case) in enumerate(wanted.items()):
        expected = expected_row(logits[row], case, [1], [], grammars.get(slot))
        assert left[row].numpy().tobytes() == expected.tobytes(), slot
        assert result.ids[row] == int(expected.argmax())
    assert result.ids.tolist()[:2] == [40, 40]
    assert result.ids[-1] == LAST


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 1100])
def test_compiled_bitmasks_equal_the_reference(vocab: int) -> None:
    """Bits at random, none, all, the last one alone, whole words of both kinds, and rows that were forbidden before."""
    rng = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    bits = rng.random((7, words * 32)) < 0.5
    bits[1], bits[2], bits[3] = False, True, np.arange(words * 32) == vocab - 1
    bits[4] = np.repeat(rng.random(words) < 0.5, 32)
    logits = torch.tensor(rng.normal(0, 2, (9, vocab)), dtype=torch.float32)
    rows = np.array([7, 0, 3, 2, 8, 5, 1], np.int32)  # rows 4 and 6 have no mask
    logits[5, bits[5][:vocab]] = -torch.inf
    logits[1] = -torch.inf
    masks, expected = np.packbits(bits, axis=1, bitorder="little").view(np.int32), logits.clone()
    make("reference").sampling.apply_bitmask(expected, rows, masks)
    make("compiled").sampling.apply_bitmask(logits, rows, masks)
    assert logits.numpy().tobytes() == expected.numpy().tobytes()


def test_bitmask_of_another_shape_is_refused(new_batch: NewBatch) -> None:
    batch = new_batch()
    batch.add(0, [1], params())
    with pytest.raises(ProtocolError, match="step 3 has 4 words of bitmask for 1 rows with 1 masks of 5"):
        batch.sample([0], torch.zeros(1, VOCAB), GrammarOutput(1, 3, i32(0), bytes(16)))


def test_rows_that_are_not_kept_change_nothing(new_batch: NewBatch) -> None:
    """Penalties, drafts and log-probabilities of the others, and their own ones later, are as without them."""
    rng, cases = np.random.default_rng(7), (CASES["all-penalties"], params(logprobs=2, frequency_penalty=1.0))
    slots, drafts = np.array([3, 8, 5, 1], np.int32), np.array([1, 0, 2, 0], np.int32)
    whole, parts = new_batch(), new_batch()
    for batch in (whole, parts):
        for number, slot in enumerate(slots.tolist()):
            batch.add(slot, [7, 7, slot], cases[number % 2])
    logits = torch.tensor(rng.normal(0, 1, (len(slots) + int(drafts.sum()), VOCAB)), dtype=torch.float32)
    at, owners = np.full(len(slots), 3, np.int32), np.repeat(np.arange(len(slots)), drafts + 1)
    for batch in (whole, parts):
        batch.history.tokens[3, 3], batch.history.tokens[5, 3:5] = int(logits[0].argmax()), 9
    for kept in (np.array([True, False, True, False]), np.array([False] * 4), np.array([True] * 4)):
        ours = whole.sampler.sample(logits.clone(), slots, at, drafts=drafts, kept=kept)
        some = torch.from_numpy(kept[owners])
        theirs = parts.sampler.sample(logits[some], slots[kept], at[kept], drafts=drafts[kept])
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.counts[kept].tolist() == theirs.counts.tolist()
        assert ours.drafted[kept].tolist() == theirs.drafted.tolist()
        assert not ours.counts[~kept].any()
        assert not ours.drafted[~kept].any()
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None:
            assert scores_of(ours).to_message() == scores_of(theirs).to_message()


def test_logprobs_are_of_the_raw_logits(new_batch: NewBatch) -> None:
    """Their ranks too, whatever rules, grammar and temperature made of the row."""
    batch, wanted = new_batch(), [None, 0, 1, 5, 20, 5, 5]
    slots = list(range(len(wanted)))
    rules = [{}, {}, {"bad_words": ((3,),)}, {"frequency_penalty": 1.0}, {"temperature": 1.5, "seed": 3}, {}, {}]
    for slot, (number, rule) in enumerate(zip(wanted, rules, strict=True)):
        batch.add(slot, [3, 1], params(logprobs=number, **rule))
    logits = torch.tensor(np.random.default_rng(5).normal(0, 3, (len(slots), VOCAB)), dtype=torch.float32)
    logits[2, 3] = 50.0
    logits[6, [10, 20, 130]] = 60.0  # ties: the lowest id first, and no rank above them
    grammar = GrammarOutput(1, 1, i32(5), bitmask({LAST}))
    _, result = batch.sample(slots, logits, grammar)
    expected = logits.double().log_softmax(-1)
    rows = scores_of(result)
    assert rows.owners.tolist() == slots[1:]
    assert rows.positions.tolist() == [2] * 6
    assert rows.counts.tolist() == [1, 2, 6, 21, 6, 6]
    first = 0
    for slot, rank, count in zip(rows.owners, rows.token_ranks, rows.counts, strict=True):
        ids, values = (column[first : first + count] for column in (rows.token_ids, rows.values))
        own = int(result.ids[slot])
        assert ids[0] == own
        assert rank == 1 + int((logits[slot] > logits[slot, own]).sum())
        order = logits[slot].sort(descending=True, stable=True).indices[: count - 1]
        assert ids[1:].tolist() == order.tolist()
        np.testing.assert_allclose(values, expected[slot, ids.astype(np.int64)], atol=1e-5, rtol=0)
        first += count
    assert result.ids[5] == LAST
    assert rows.token_ranks[1] > 1
    assert rows.token_ids[-5:-2].tolist() == [10, 20, 130]
    _, masked = batch.sample([5], logits[5:6], grammar)  # nothing else changes a row of this step
    assert scores_of(masked).values.tolist() == rows.values[-12:-6].tolist()


@pytest.mark.parametrize("vocab", [1, 7, 16, 64, 65, 1000])
def test_logprobs_at_every_size_of_vocabulary(new_batch: NewBatch, vocab: int) -> None:
    """Also with logits that are equal, or minus infinity; more alternatives than tokens are all tokens."""
    rng = np.random.default_rng(vocab)
    for logits in (
        rng.normal(0, 5, (1, vocab)),
        np.zeros((1, vocab)),
        np.where(rng.random((1, vocab)) < 0.5, -np.inf, np.arange(vocab)) + np.eye(1, vocab),
        np.arange(vocab)[None],
    ):
        batch = new_batch(vocab)
        batch.add(0, [0], params(logprobs=20))
        row = torch.tensor(logits, dtype=torch.float32)
        if not torch.isfinite(row).any():
            continue
        _, result = batch.sample([0], row)
        rows, top = scores_of(result), min(20, vocab)
        assert rows.counts.tolist() == [top + 1]
        order = row[0].sort(descending=True, stable=True).indices[:top]
        assert rows.token_ids[1:].tolist() == order.tolist()
        np.testing.assert_allclose(rows.values[1:], row[0].log_softmax(-1)[order], atol=2e-5, rtol=1e-6)
        assert rows.token_ranks.tolist() == [1]
