"""The demo model and its EAGLE head: answers are those without drafts, and many drafts are right, however the work is
cut into steps. The least acceptance asserted here is out of reach for a head that reads wrong states or positions."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from protocol.membership import Speculation
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


def eagle(threads: int = 1, k: int = K, dtype: str = "float32") -> RunnerDriver:
    speculation = Speculation("eagle", k)
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype=dtype, threads=threads, speculation=speculation)
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


def test_head_of_a_model_in_bfloat16_computes_in_float32() -> None:
    """Beside AMX, too. Same tokens (docs/invariants.md)."""
    plain = RunnerDriver(DEMO_MODEL, block_size=16, dtype="bfloat16")
    reference = [plain.add(prompt) for prompt in prompts()]
    plain.generate(reference, TOKENS + K)
    for depth in (1, 2):
        driver = eagle(dtype="bfloat16")
        requests = [driver.add(prompt) for prompt in prompts()]
        driver.generate(requests, TOKENS, depth=depth)
        assert_equal(requests, reference)
        assert sum(request.accepted for request in requests) / sum(request.drafted for request in requests) > 0.25


@pytest.mark.parametrize(
    ("chunk", "depth", "threads", "k"),
    [(1, 1, 1, K), (5, 2, 1, 1), (7, 3, 1, K), (5, 1, 3, K), (7, 2, 2, 1), (5, 3, 3, K)],
)
def test_chunks_depth_threads_and_number_of_drafts_change_no_draft(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted],
    plain: list[DrivenRequest],
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    depth: int,
    threads: int,
    k: int,
) -> None:
    """Equal acceptance: from a prompt in chunks the head computes the same as from a whole one (prompt chunks)."""
    monkeypatch.setattr(product, "WORTH", 1)  # small products are shared too
    driver = eagle(threads, k)
    proposed = record(driver, monkeypatch)
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, TOKENS, chunk, depth)
    assert_equal(requests, plain)
    same = [key for key in proposed if key in first[2]]
    assert len(same) > 60
    assert [proposed[key] for key in same] == [first[2][key][:k] for key in same]


def test_preempted_requests_draft_on_as_before(
    first: tuple[RunnerDriver, list[DrivenRequest], Drafted],
    plain: list[DrivenRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = eagle()
    requests = [driver.add(prompt) for prompt in prompts()]
    driver.generate(requests, 12)
    # Each gets the slot of another one, and the blocks of several
    driver.free_slots = [request.slot for request in requests[1:] + requests[:1]]
    driver.free_blocks += [block for request in requests for block in request.blocks]
    again = [driver.preempt(request) for request in requests]
    proposed = record(driver, monkeypatch)
    driver.generate(again, TOKENS)
    assert_equal(again, plain)
    slots = {new.slot: old.slot for new, old in zip(again, first[1], strict=True)}
    same = [(slot, end) for slot, end in proposed if (slots[slot], end) in first[2]]
    assert len(same) > 30
    assert [proposed[key] for key in same] == [first[2][slots[key[0]], key[1]] for key in same]


def test_other_models_have_no_head_of_their_own(llama: Family) -> None:
    with pytest.raises(LoadError, match='without a head of its own; name one as "model"'):
        RunnerDriver(llama.path, speculation=Speculation("eagle", K))
