"""Drafts change how many steps an answer takes, and nothing else: hand-made plans through the runner."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT, GrammarOutput
from services.checkpoint import DEMO_MODEL
from services.worker.backends.native import drafters
from services.worker.backends.native.drafters.base import I32, Advance, Drafter, DrafterSlots, Proposer
from services.worker.backends.native.drafters.eagle import eagle_drafter
from services.worker.batch.slots import PlanError
from services.worker.runner import LoadError
from tests.integration.native.conftest import SMALL, Family, save
from tests.integration.native.driver import DrivenRequest, RunnerDriver, compute_within, i32, ints

TOKENS = 26
CROWD: list[SamplingParams] = [
    SamplingParams(1000, 0.0, prompt_logprobs=1),
    SamplingParams(1000, 1.0, seed=5),
    SamplingParams(1000, 0.9, top_p=0.9, top_k=40, seed=6, logprobs=2),
    SamplingParams(1000, 0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7, logprobs=0),
    SamplingParams(1000, 1.0, seed=7, repetition_penalty=1.2, presence_penalty=-0.5),
    SamplingParams(1000, 0.0, bad_words=tuple((token, other) for token in range(0, 211, 3) for other in (5, 80, 143))),
    SamplingParams(1000, 0.0, min_tokens=9, eos_token_ids=tuple(range(0, 211, 2))),
    SamplingParams(1000, 0.7, seed=8, logit_bias=((3, 4.0), (99, 5.0)), logprobs=1),
]  # fmt: skip


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 211, 9 + 3 * number).tolist() for number in range(len(CROWD))]


class ScriptedProposer(Proposer):
    """Proposes the tokens of a known answer, and other tokens where it is `wrong`."""

    def __init__(self, slots: DrafterSlots) -> None:
        self._limit = slots.table.max_model_len
        self.answers: dict[int, list[int]] = {}
        """By slot: prompt and output."""
        self.wrong: Callable[[int], bool] = lambda position: position * 2654435761 % 2**32 < 2**30
        self.seen: list[Advance] = []

    def propose(self, advance: Advance, k: int) -> I32:
        self.seen.append(advance)
        drafts = np.full((int(advance.samples.sum()), k), NO_DRAFT, np.int32)
        ends = zip(advance.slots[advance.samples].tolist(), advance.ends[advance.samples].tolist(), strict=True)
        for row, (slot, end) in enumerate(ends):
            answer = self.answers.get(slot, [])
            for j in range(k):
                position = end + 1 + j
                if position < min(len(answer), self._limit):
                    drafts[row, j] = (answer[position] + self.wrong(position)) % 211
        return drafts


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "create", lambda _: Drafter(ScriptedProposer))


def script(driver: RunnerDriver) -> ScriptedProposer:
    proposer = driver.epoch.proposer
    assert isinstance(proposer, ScriptedProposer)
    return proposer


@pytest.fixture(scope="module")
def alone(make_family: Callable[[str], Family]) -> list[DrivenRequest]:
    """Each of CROWD by itself, without drafts."""
    requests = []
    for prompt, params in zip(prompts(), CROWD, strict=True):
        driver = RunnerDriver(make_family("llama-tied").path)
        requests.append(driver.add(prompt, params))
        driver.generate(requests[-1:], TOKENS + 8)
    return requests


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Another model with the same vocabulary."""
    torch.manual_seed(3)
    sizes = {**SMALL, "num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 64}
    return save(LlamaForCausalLM(LlamaConfig(**sizes)), tmp_path_factory.mktemp("small"))


def ngram(k: int) -> Speculation:
    return Speculation("ngram", k, prompt_lookup_min=1, prompt_lookup_max=4)


def crowd(driver: RunnerDriver, alone: list[DrivenRequest]) -> list[DrivenRequest]:
    requests = [driver.add(prompt, params) for prompt, params in zip(prompts(), CROWD, strict=True)]
    if isinstance(driver.epoch.proposer, ScriptedProposer):
        script(driver).answers = {
            request.slot: reference.tokens for request, reference in zip(requests, alone, strict=True)
        }
    return requests


def assert_equal(requests: list[DrivenRequest], alone: list[DrivenRequest]) -> None:
    """Tokens and log-probabilities, to the bit."""
    for request, reference in zip(requests, alone, strict=True):
        assert request.output[:TOKENS] == reference.output[:TOKENS], request.params
        end = len(request.prompt) + TOKENS
        for scores in (request.scores, reference.scores):
            for position in [at for at in scores if at >= end]:
                del scores[position]
        assert request.scores == reference.scores, request.params


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("k", "depth", "chunk"), [(1, 2, 100), (3, 1, 5), (3, 2, 100), (5, 3, 7)])
def test_answers_are_those_without_drafts(
    llama: Family, alone: list[DrivenRequest], k: int, depth: int, chunk: int
) -> None:
    """Same tokens and row width at every acceptance, for each parameter, in chunks and batches of any shape."""
    driver = RunnerDriver(llama.path, speculation=Speculation("scripted", k))
    requests = crowd(driver, alone)
    driver.generate(requests, TOKENS, chunk, depth)
    assert_equal(requests, alone)
    for request in requests:
        assert 0 < request.accepted < request.drafted
    counts = {int(count) for seen in script(driver).seen[9:] for count in seen.counts[seen.samples]}
    # No two wrong drafts are further apart, or neighbours
    assert counts >= ({1, 2, k + 1} if k < 4 else {2, 3, 5})


@pytest.mark.usefixtures("scripted")
def test_drafted_and_accepted_do_not_depend_on_depth(llama: Family, alone: list[DrivenRequest]) -> None:
    """Equal acceptance, to the token, over as many steps."""
    counts = []
    for depth in (1, 2, 3):
        driver = RunnerDriver(llama.path, speculation=Speculation("scripted", 3))
        requests, flying = crowd(driver, alone), []
        for _ in range(9):
            flying.append(driver.launch([(request, request.known - request.computed) for request in requests]))
            if len(flying) == depth:
                driver.collect(flying.pop(0))
        for launched in flying:
            driver.collect(launched)
        counts.append([(request.drafted, request.accepted) for request in requests])
    assert counts[0] == counts[1] == counts[2]
    assert len(set(counts[0])) > 1


@pytest.mark.usefixtures("scripted")
def test_rows_change_places_and_requests_skip_steps(llama: Family, alone: list[DrivenRequest]) -> None:
    """Drafts belong to slots, not rows, and stay there for requests that skip a step (latest drafts)."""
    driver, rng = RunnerDriver(llama.path, speculation=Speculation("scripted", 3)), np.random.default_rng(4)
    requests = crowd(driver, alone)
    while any(len(request.output) < TOKENS for request in requests):
        some = [requests[i] for i in rng.permutation(len(requests))[:5] if len(requests[i].output) < TOKENS]
        if some:
            driver.step([(request, min(11, request.known - request.computed)) for request in some])
    assert_equal(requests, alone)
    assert sum(request.accepted for request in requests) > 10


@pytest.mark.usefixtures("scripted")
def test_keys_of_rejected_drafts_are_overwritten(llama: Family) -> None:
    """After many wrong drafts the next logits are the same bits as without any."""
    plain, driver = RunnerDriver(llama.path), RunnerDriver(llama.path, speculation=Speculation("scripted", 3))
    reference, request = plain.add(prompts()[3]), driver.add(prompts()[3])
    plain.generate([reference], 24)
    script(driver).wrong = lambda position: True
    script(driver).answers[request.slot] = reference.tokens
    driver.generate([request], 20)
    assert request.output == reference.output[:20]
    assert request.drafted > 50
    assert request.accepted == 0
    for ours, theirs in zip(driver.logits, plain.logits, strict=False):
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("depth", [1, 2])
def test_context_ends_inside_a_row(llama: Family, depth: int) -> None:
    """k larger than the room: positions never reach the context's end (position bound)."""
    prompt, limit = prompts()[2], 31
    plain = RunnerDriver(llama.path, max_model_len=limit)
    reference = plain.add(prompt)
    plain.generate([reference], limit - len(prompt))
    for wrong in (lambda position: False, lambda position: position % 2 == 0):
        driver = RunnerDriver(llama.path, max_model_len=limit, speculation=Speculation("scripted", 5))
        script(driver).wrong = wrong
        request = driver.add(prompt)
        script(driver).answers[request.slot] = reference.tokens
        driver.generate([request], limit - len(prompt), depth=depth)
        assert request.output[: limit - len(prompt)] == reference.output
        assert request.accepted > 5
        assert all((seen.ends <= limit).all() for seen in script(driver).seen)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("depth", [1, 2])
def test_real_drafters_change_no_token(
    llama: Family, alone: list[DrivenRequest], method: str, depth: int, small: Family
) -> None:
    wanted = ngram(3) if method == "ngram" else Speculation("draft_model", 3, str(small.path))
    driver = RunnerDriver(llama.path, speculation=wanted)
    requests = crowd(driver, alone)
    driver.generate(requests, TOKENS, chunk=7, depth=depth)
    assert_equal(requests, alone)
    assert sum(request.drafted for request in requests) > 0


def test_lookup_finds_what_was_said(llama: Family) -> None:
    """An answer that goes in circles is drafted from itself, as soon as it does."""
    driver = RunnerDriver(llama.path, speculation=ngram(3))
    request = driver.add(prompts()[0], SamplingParams(1000, 0.0, logit_bias=((3, 100.0),)))
    driver.generate([request], 60)
    assert set(request.output) == {3}
    assert request.drafted == request.accepted > 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_itself_drafts_all_that_it_says(llama: Family, dtype: str) -> None:
    """Its keys and values beside the target's are right, behind accepted, rejected and missing drafts, chunks and a
    cached prefix: whatever is verified is accepted."""
    driver = RunnerDriver(llama.path, dtype=dtype, speculation=Speculation("draft_model", 3, str(llama.path)))
    first = driver.add(prompts()[4])
    driver.generate([first], 14, chunk=6)
    hit = driver.add([*first.tokens[:20], 3, 1, 4], prefix=first, hit=20)
    requests = [first, hit, driver.add(prompts()[5], SamplingParams(1000, 1.0, seed=1))]
    for wanted in (3, 0, 0, 2, 3, 1, 3):
        driver.k = wanted
        driver.step([(request, request.known - request.computed) for request in requests])
    assert min(request.drafted for request in requests) > 5
    if dtype == "float32":
        for request in requests[:2]:
            assert request.accepted == request.drafted
    assert requests[2].accepted < requests[2].drafted


def test_drafter_with_a_shorter_context_stops_drafting(llama: Family) -> None:
    """Drafter limit: a sequence that is longer than the drafter can read gets no drafts; answers stay the same."""
    for wanted in (
        Speculation("draft_model", 3, str(llama.path), max_model_len=40),
        msgspec.structs.replace(ngram(3), max_model_len=40),
    ):
        plain, driver = RunnerDriver(llama.path), RunnerDriver(llama.path, speculation=wanted)
        prompt = [7, 8, 9] * 9
        reference, request = plain.add(prompt), driver.add(prompt)
        plain.generate([reference], 40)
        driver.generate([request], 13)
        driver.step([(request, 1)])
        assert request.drafted > 0
        drafted = request.drafted
        driver.generate([request], 40)
        assert request.output[:40] == reference.output
        assert request.drafted <= drafted + 3


def test_draft_model_of_another_vocabulary_is_refused(llama: Family, tmp_path: Path) -> None:
    other = save(LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 99})), tmp_path)
    with pytest.raises(LoadError, match=r"has 99 tokens, but the model has 211; they must have the same vocabulary"):
        RunnerDriver(llama.path, speculation=Speculation("draft_model", 2, str(other.path)))


def test_drafter_that_nobody_has_is_refused(llama: Family) -> None:
    with pytest.raises(LoadError, match="speculation by medusa is not supported"):
        RunnerDriver(llama.path, speculation=Speculation("medusa", 2))


# -- structured output -------------------------------------------------------------------------------------------


def allowed(position: int) -> np.ndarray:
    """int32[words]: another third of the vocabulary at every position."""
    bits = np.zeros(-(-211 // 32) * 32, np.uint8)
    bits[position % 3 : 211 : 3] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def constrained(
    driver: RunnerDriver, request: DrivenRequest, masks: Callable[[int], int] | None
) -> Iterator[tuple[int, ...]]:
    """Steps of one request whose every position has a mask; `masks(k')` are sent. Yields counts, drafted and drafts."""
    while len(request.output) < TOKENS:
        begin = request.computed
        plan = driver.plan([(request, request.known - request.computed)])
        plan = msgspec.structs.replace(plan, has_structured_output_requests=True, masked=i32(request.slot))
        driver.runner.execute_model(plan)
        planned = ints(plan.drafts)[0] if plan.drafts else 0
        count = masks(planned) if masks else 1
        first = begin + ints(plan.counts)[0] - planned
        words = np.concatenate([allowed(first + j) for j in range(count)])
        counts = i32(count) if masks else b""
        driver.runner.add_masks(GrammarOutput(1, plan.step_id, i32(request.slot), words.tobytes(), counts))
        result = driver.runner.sample_tokens(None).get()
        got = ints(result.counts)[0]
        request.output += ints(result.token_ids)
        request.computed -= planned - (got - 1)
        request.known -= planned - (got - 1)
        assert len(ints(result.draft_token_ids)) == driver.k
        yield got, ints(result.drafted)[0] if result.drafted else 0, *ints(result.draft_token_ids)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("params", [CROWD[0], CROWD[3], CROWD[4]], ids=["greedy", "penalties", "sampled"])
def test_masks_hold_at_every_draft(llama: Family, params: SamplingParams) -> None:
    """As many drafts are accepted as masks allow to be; where information is missing, none (acceptable drafts)."""
    plain = RunnerDriver(llama.path)
    reference = plain.add(prompts()[1], params)
    assert all(step == (1, 0) for step in constrained(plain, reference, None))
    for masks, most in ((lambda planned: planned + 1, 3), (lambda planned: min(2, planned + 1), 1), (None, 0)):
        driver = RunnerDriver(llama.path, speculation=Speculation("scripted", 3))
        request = driver.add(prompts()[1], params)
        script(driver).answers[request.slot] = reference.tokens
        steps = list(constrained(driver, request, masks))
        assert request.output[:TOKENS] == reference.output[:TOKENS]
        assert max(step[0] for step in steps) == 1 + most
        assert max(step[1] for step in steps) == most
        assert any(NO_DRAFT not in step[2:] for step in steps)


# -- what the device refuses and never does ----------------------------------------------------------------------


def test_drafts_without_speculation_are_refused(llama: Family) -> None:
    driver = RunnerDriver(llama.path)
    request = driver.add(prompts()[0])
    driver.generate([request], 2)
    driver.promised_drafts[request.slot] = 1
    request.blocks += [0]
    with pytest.raises(PlanError, match="this group was assigned no speculation"):
        driver.step([(request, 1)])


class Waits(TorchDispatchMode):
    """Names of the operations that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_to_host")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        masks = [a for arg in args[1:2] if isinstance(arg, list | tuple) for a in arg if torch.is_tensor(a)]
        by_mask = name.startswith("index") and any(mask.dtype == torch.bool for mask in masks)
        if name in self.WAITS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_decode_step_waits_for_no_device(
    llama: Family, small: Family, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """No hidden sync: on this device memory is the host's, so the test is that no value is read through torch."""
    wanted = ngram(3) if method == "ngram" else Speculation("draft_model", 3, str(small.path))
    driver = RunnerDriver(llama.path, speculation=wanted)
    requests = [driver.add([5] * 20), driver.add(prompts()[0], SamplingParams(1000, 1.0, seed=2))]
    driver.generate(requests, 3)
    asked: list[str] = []
    for name in ("item", "tolist", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *args, name=name: asked.append(name))
    with Waits() as waits:
        torch.ones(2).nonzero()
        assert waits.seen.pop() == "nonzero", "the mode sees what it looks for"
    compute_within(waits, monkeypatch)
    for _ in range(4):
        plan = driver.plan([(request, 1) for request in requests])
        driver.runner.execute_model(plan)
        output = driver.runner.sample_tokens(None)
        assert driver.epoch, "the step is computed, and its result not packed yet"
        assert waits.seen + asked == []
        result = output.get()
        asked.clear()
        planned = zip(requests, ints(plan.drafts), ints(result.counts), strict=True)
        for request, drafts, count in planned:
            request.computed -= drafts - (count - 1)
            request.known -= drafts - (count - 1)


@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_a_rest_changes_no_token(method: str) -> None:
    """Prompts, and slots that other requests had, are among what the drafter misses."""
    wanted = Speculation("eagle", 3, str(DEMO_MODEL / "eagle")) if method == "eagle" else ngram(3)
    rng = np.random.default_rng(2)
    some = [rng.integers(300, 4096, size).tolist() for size in (30, 9, 17)]
    outputs, accepted = [], 0
    for speculation in (None, wanted):
        driver = RunnerDriver(DEMO_MODEL, speculation=speculation, dtype="float32")
        requests = [driver.add(prompt) for prompt in some[:2]]
        for number in range(40):
            driver.rests = speculation is not None and number % 13 < 5
            driver.k = 3 * (speculation is not None and number % 13 > 8)
            if number == 14:
                requests.append(driver.preempt(requests[0]))
            if number == 27:
                requests.append(driver.add(some[2]))
            here = requests[number >= 14 :]
            before = len(requests[-1].output)
            driver.step([(request, request.known - request.computed) for request in here])
            accepted += len(requests[-1].output) - before > 1
        outputs.append([request.output for request in requests])
    for plain, drafted in zip(*outputs, strict=True):
        assert drafted[: len(plain)] == plain
    assert accepted or method == "ngram"


def test_deferred_steps_change_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that gets steps late proposes the same drafts as one that gets each step at once."""
    wanted = Speculation("eagle", 3, str(DEMO_MODEL / "eagle"))
    rng = np.random.default_rng(2)
    some = [rng.integers(300, 4096, size).tolist() for size in (30, 9, 17)]
    seen = []
    for create in (drafters.create, eagle_drafter):
        monkeypatch.setattr(drafters, "create", create)
        driver = RunnerDriver(DEMO_MODEL, speculation=wanted, dtype="float32")
        requests, drafts = [driver.add(prompt) for prompt in some], []
        for number, driver.k in enumerate((3, 0, 0, 0, 2, 0, 3, 3)):
            here = requests[: 2 + number % 2] if number else requests
            driver.step([(request, request.known - request.computed) for request in here])
            drafts.append((driver.epoch.drafts.slots.proposed.tolist(), driver.epoch.drafts.slots.tokens[:3].tolist()))
        seen.append((drafts, [request.output for request in requests]))
    assert seen[0] == seen[1]
    assert any(number > 1 for number in seen[0][0][-1][0])
