"""The demo model and its EAGLE head: answers are those without drafts, and most drafts are right, however the work is
cut into steps. The least acceptance asserted here is out of reach for a head that reads wrong states or positions."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT
from services.checkpoint import DEMO_MODEL
from services.worker.backends.native.drafters.base import I32, Advance
from services.worker.kernels.cpu.compiled import product
from services.worker.runner import LoadError
from tests.integration.native.conftest import Family
from tests.integration.native.driver import DrivenRequest, RunnerDriver

TOKENS, K = 48, 3
QUESTIONS = (
    "What is str.split?",
    "Explain json.dumps.",
    "Describe re.compile as JSON.",
    "Which arguments does random.choice take?",
    "List the functions of glob.",
    "Hello",
)
Drafted = dict[tuple[int, int], list[int]]
"""Drafts by slot and by the position after which they were made."""


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|bos|><|user|>{text}<|eos|><|assistant|>", add_special_tokens=False).ids
        for text in QUESTIONS
    ]


def eagle(k: int = K, threads: int = 1, **changes: int) -> RunnerDriver:
    speculation = Speculation("eagle", k, **changes)
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32", threads=threads, speculation=speculation)
    driver.min_acceptance = 0.2
    return driver


def record(driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Everything that the drafter proposes from now on."""
    proposer, proposed = driver.epoch.proposer, {}
    propose: Callable[[Advance, int], I32] = proposer.propose

    def recorded_propose(advance: Advance, k: int) -> I32:
        drafts = propose(advance, k)
        ends = zip(advance.slots[advance.samples], advance.ends[advance.samples], strict=True)
        for (slot, end), row in zip(ends, drafts.tolist(), strict=True):
            proposed[int(slot), int(end)] = row
        return drafts

    monkeypatch.setattr(proposer, "propose", recorded_propose)
    return proposed


@pytest.fixture(scope="module")
def plain() -> list[DrivenRequest]:
    """The answers without drafts."""
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32")
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, TOKENS + K)
    return requests


@pytest.fixture(scope="module")
def first(plain: list[DrivenRequest]) -> tuple[RunnerDriver, list[DrivenRequest], Drafted]:
    """The same with drafts, each whole prompt in one step."""
    with pytest.MonkeyPatch.context() as patch:
        driver = eagle()
        proposed = record(driver, patch)
        requests = [driver.add(prompt) for prompt in prompts()]
        driver.generate(requests, TOKENS)
    return driver, requests, proposed


def assert_equal(requests: list[DrivenRequest], plain: list[DrivenRequest]) -> None:
    for request, reference in zip(requests, plain, strict=True):
        assert request.output[:TOKENS] == reference.output[:TOKENS]


def test_answers_are_those_without_drafts(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted], plain: list[DrivenRequest]
) -> None:
    """Same tokens (docs/invariants.md)."""
    _, requests, _ = first
    assert_equal(requests, plain)
    drafted, accepted = (sum(getattr(r, name) for r in requests) for name in ("drafted", "accepted"))
    assert accepted / drafted > 0.25


def test_most_first_drafts_are_right(plain: list[DrivenRequest]) -> None:
    driver = eagle(1)
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, TOKENS, depth=2)
    assert_equal(requests, plain)
    assert sum(r.accepted for r in requests) / sum(r.drafted for r in requests) > 0.55


@pytest.mark.parametrize(
    ("chunk", "depth", "threads"), [(1, 1, 1), (5, 2, 1), (7, 3, 1), (5, 1, 3), (7, 2, 2), (5, 3, 3)]
)
def test_chunks_depth_and_threads_change_no_draft(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted],
    plain: list[DrivenRequest],
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    depth: int,
    threads: int,
) -> None:
    """Equal acceptance: from a prompt in chunks the head computes the same as from a whole one (prompt chunks)."""
    monkeypatch.setattr(product, "WORTH", 1)  # small products are shared too
    driver = eagle(threads=threads)
    proposed = record(driver, monkeypatch)
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, TOKENS, chunk, depth)
    assert_equal(requests, plain)
    same = [key for key in proposed if key in first[2]]
    assert len(same) > 60
    assert [proposed[key] for key in same] == [first[2][key] for key in same]


def test_drafts_after_rejections_are_those_of_a_fresh_start(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted],
    plain: list[DrivenRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's cache holds nothing of rejected drafts: a request that comes with the same tokens gets the same."""
    _, requests, expected = first
    driver = eagle()
    proposed = record(driver, monkeypatch)
    for request, reference in zip(requests, plain, strict=True):
        ends = sorted(end for slot, end in expected if slot == request.slot)
        assert request.accepted < request.drafted
        fresh = driver.add(reference.tokens[: ends[-2]])
        driver.step([(fresh, ends[-2])])
        assert proposed[fresh.slot, ends[-2]] == expected[request.slot, ends[-2]]


def test_preempted_requests_draft_on_as_before(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted],
    plain: list[DrivenRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = eagle()
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, 12)
    driver.promised_drafts.clear()
    again = [driver.preempt(request) for request in requests]
    proposed = record(driver, monkeypatch)
    driver.generate(again, TOKENS, chunk=9)
    assert_equal(again, plain)
    slots = {new.slot: old.slot for new, old in zip(again, first[1], strict=True)}
    same = [(slot, end) for slot, end in proposed if (slots[slot], end) in first[2]]
    assert len(same) > 30
    assert [proposed[key] for key in same] == [first[2][slots[key[0]], key[1]] for key in same]


def test_a_cached_prefix_is_one_for_the_head_too(plain: list[DrivenRequest]) -> None:
    driver = eagle()
    prompt = plain[2].tokens[:50]
    one = driver.add(prompt)
    driver.generate([one], TOKENS)
    two = driver.add(prompt, prefix=one, hit=48)
    driver.generate([two], TOKENS)
    assert two.output[:TOKENS] == one.output[:TOKENS]
    assert abs(two.accepted - one.accepted) <= 2


def test_sampled_answers_are_those_without_drafts() -> None:
    """Same tokens with seeded noise at temperature 1, where many drafts are rejected."""
    params = [SamplingParams(1000, 1.0, seed=seed, logprobs=1) for seed in range(len(QUESTIONS))]
    with_drafts, without = eagle(), RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32")
    answers = []
    for driver in (with_drafts, without):
        requests = [driver.add(prompt, p) for prompt, p in zip(prompts(), params, strict=True)]
        driver.generate(requests, TOKENS, depth=2)
        answers.append([request.output[:TOKENS] for request in requests])
        if driver is with_drafts:
            assert 0 < sum(r.accepted for r in requests) < sum(r.drafted for r in requests)
    assert answers[0] == answers[1]


def test_sequences_longer_than_the_drafter_takes(plain: list[DrivenRequest]) -> None:
    """Drafter limit: nothing is drafted beyond the context, as much as before within it; answers stay the same."""
    longest = 40
    driver = eagle(max_model_len=longest)
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, TOKENS)
    assert_equal(requests, plain)
    assert all(len(request.prompt) + TOKENS > longest for request in requests)
    drafted, accepted = (sum(getattr(r, name) for r in requests) for name in ("drafted", "accepted"))
    assert 0 < drafted < longest * len(requests)
    assert accepted / drafted > 0.25


def test_no_drafts_when_none_are_asked_for_and_good_ones_after(plain: list[DrivenRequest]) -> None:
    """The head follows the request while k is 0, as with few accepted drafts or a full batch."""
    driver = eagle()
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.k = 0
    driver.generate(requests, 20)
    assert not any(request.drafted for request in requests)
    driver.k = K
    driver.generate(requests, TOKENS)
    assert_equal(requests, plain)
    assert sum(r.accepted for r in requests) / sum(r.drafted for r in requests) > 0.25


def test_drafts_of_each_step_are_of_the_vocabulary(first: tuple[RunnerDriver, list[DrivenRequest], Drafted]) -> None:
    """Ids of the draft vocabulary are turned into tokens (valid ids)."""
    drafts = np.array(list(first[2].values()))
    assert drafts.shape[1] == K
    assert drafts.min() >= NO_DRAFT
    assert drafts.max() >= 1024, "ids of tokens, not of the 1,024 that the head knows"
    assert not ((drafts[:, :-1] == NO_DRAFT) & (drafts[:, 1:] != NO_DRAFT)).any()
    assert 0 < (drafts == NO_DRAFT).mean() < 0.5, "the unlikely ones are left out"


def test_other_models_have_no_head_of_their_own(llama: Family) -> None:
    with pytest.raises(LoadError, match='without a head of its own; name one as "model"'):
        RunnerDriver(llama.path, speculation=Speculation("eagle", K))


def test_the_demo_head_on_another_model_is_refused(llama: Family) -> None:
    head: Path = DEMO_MODEL / "eagle"
    with pytest.raises(LoadError, match="its vocabulary has 4096 tokens, that of the model 211"):
        RunnerDriver(llama.path, speculation=Speculation("eagle", K, str(head)))
