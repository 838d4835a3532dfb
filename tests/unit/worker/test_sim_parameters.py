"""Every sampling parameter on the simulator gives the tokens of the plain reference sampler."""

from collections import deque

import msgspec
import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.rows import EmbeddingRows
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE, hidden_states
from services.worker.backends.sim.model.oracle import OracleError
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.sampling.reference import TokenLogprobs
from tests.unit.worker.fake_device import FakeDevice
from tests.unit.worker.plans import (
    GREEDY,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    grammar_output,
    prompt,
    result_of,
    run,
    sampled,
    sim_runner,
    tokens,
)
from tests.unit.worker.sim_reference import answer, assert_scored, chain, scores


def greedy(**params: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **params)


def everything(text: list[int]) -> dict[str, SamplingParams]:
    """Return parameters by name, each of which changes the tokens after `text`."""
    plain = answer(text, GREEDY, 8)
    return {
        "presence": greedy(presence_penalty=-2.0, frequency_penalty=-2.0),
        "repetition": greedy(repetition_penalty=0.05),
        "drawn with penalties": sampled(3, frequency_penalty=-2.0, repetition_penalty=0.2),
        "bias": greedy(logit_bias=((11, 4.0), (12, 4.0))),
        "a bad word": greedy(bad_words=((plain[0], plain[1]), (plain[3],))),
        "allowed": greedy(allowed_token_ids=pack([4, 9, 16, 25, 36])),
        "drawn of the allowed": sampled(5, allowed_token_ids=pack([4, 9, 16, 25, 36]), top_p=0.9),
        "min tokens": greedy(min_tokens=6, stop_token_ids=(plain[4],)),
    }


NAMES = list(everything(prompt(1, 9)))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_alone_gets_the_reference_tokens_and_others_without_the_parameter(name: str) -> None:
    text = prompt(1, 9)
    params = everything(text)[name]
    runner, plans = sim_runner(), PlanBuilder()
    request = plans.admit(text, params)
    got = [run(runner, plans.step(request))[request.slot] for _ in range(8)]
    assert got == answer(text, params, 8)
    plain = GREEDY if params.temperature == 0 else sampled(params.seed, temperature=params.temperature)
    assert got != answer(text, plain, 8)


class AsyncSteps:
    """A runner on a FAKE asynchronous device, which runs steps ahead of the host."""

    def __init__(self) -> None:
        self.device, self.plans = FakeDevice(), PlanBuilder()
        self.runner: SimRunner = sim_runner(make_device=lambda: self.device)

    def launch(self, plan: SchedulerOutput) -> StepOutput:
        self.runner.execute_model(plan)
        return self.runner.sample_tokens(None)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_of_a_batch_get_the_reference_tokens_at_any_depth(depth: int) -> None:
    """Chunks, rows that skip steps, and requests that are preempted and resumed in other slots."""
    steps, rng = AsyncSteps(), np.random.default_rng(depth)
    texts = {name: prompt(i, 5 + i) for i, name in enumerate(NAMES)}
    requested = {name: msgspec.structs.replace(everything(texts[name])[name], logprobs=3) for name in NAMES}
    outputs: dict[str, list[int]] = {name: [] for name in NAMES}
    scored: dict[str, dict[int, TokenLogprobs]] = {name: {} for name in NAMES}
    running: dict[str, SlotRequest] = {}
    waiting, resumed = list(NAMES), 0
    in_flight: deque[tuple[StepOutput, dict[int, str]]] = deque()

    def apply_oldest() -> None:
        output, names = in_flight.popleft()
        result = result_of(output)
        for slot, token in tokens(result).items():
            outputs[names[slot]].append(token)
        for (slot, position), entry in scores(result).items():
            scored[names[slot]][position] = entry

    for _ in range(120):
        while waiting and len(running) < 5:
            name = waiting.pop(0)
            text = texts[name]
            running[name] = steps.plans.admit(text + outputs[name], requested[name], num_prompt=len(text))
        chosen = [name for name in running if rng.random() < 0.7]
        rows = [(running[n], int(rng.integers(1, running[n].left + 1))) for n in chosen]
        if rows:
            output = steps.launch(steps.plans.step(*rows))
            in_flight.append((output, {running[name].slot: name for name in chosen}))
        while len(in_flight) >= depth:
            apply_oldest()
        entered = [name for name, request in running.items() if request.start]
        if rng.random() < 0.15 and entered:
            while in_flight:
                apply_oldest()
            name = entered[int(rng.integers(len(entered)))]
            steps.plans.release(running.pop(name))
            resumed += bool(outputs[name])
            if len(outputs[name]) < 12:
                waiting.append(name)
    while in_flight:
        apply_oldest()
    steps.runner.shutdown()
    assert resumed > 3
    assert not steps.device.violations
    for name, got in outputs.items():
        text = texts[name]
        assert len(got) > 6
        assert got == answer(text, requested[name], len(got)), name
        assert sorted(scored[name]) == [len(text) + i for i in range(len(got))]
        for i, token in enumerate(got):
            assert_scored(scored[name][len(text) + i], text + got[:i], token, 3)


def test_the_slot_may_have_another_owner_when_the_device_samples() -> None:
    """Immutable result: a row uses the parameters of its launch."""
    steps, text = AsyncSteps(), prompt(1, 9)
    first = steps.plans.admit(text, msgspec.structs.replace(everything(text)["bias"], logprobs=2))
    plan = steps.plans.step(first)
    steps.device.compute.gate.clear()
    output = steps.launch(plan)
    steps.plans.release(first, reuse_slot=True)
    second = steps.plans.admit(prompt(2, 3))
    later = steps.launch(steps.plans.step(second))
    assert second.slot == first.slot
    steps.device.compute.gate.set()
    (token,) = answer(text, first.params, 1)
    assert tokens(output.get()) == {first.slot: token}
    assert_scored(scores(result_of(output))[first.slot, len(text)], text, token, 2)
    assert tokens(later.get()) == {second.slot: answer(prompt(2, 3), GREEDY, 1)[0]}
    assert result_of(later).logprobs is None
    steps.runner.shutdown()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        sampled(4),
        sampled(4, top_p=0.6, top_k=9, min_p=0.01),
        greedy(frequency_penalty=2.0, logprobs=1),
        sampled(6, bad_words=((2,), (8, 4)), presence_penalty=1.5),
        greedy(min_tokens=9, eos_token_ids=tuple(range(0, VOCAB, 4))),
    ],
)
@pytest.mark.parametrize("shape", ["wide", "narrow", "one", "only what is forbidden"])
def test_a_grammar_and_all_other_parameters(params: SamplingParams, shape: str) -> None:
    """The logits are computed for the allowed tokens alone, and give the reference tokens."""
    text, output = prompt(1, 9), []
    allowed = {
        "wide": range(1, VOCAB),
        "narrow": range(0, VOCAB, 7),
        "one": [41],
        "only what is forbidden": [2],
    }[shape]
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    runner, plans = sim_runner(), PlanBuilder()
    request, other = plans.admit(text, params), plans.admit(prompt(2, 4))
    for _ in range(6):
        plan = plans.step(other, request, grammar=True)
        runner.execute_model(plan)
        result = result_of(runner.sample_tokens(grammar_output(plan, [request.slot], mask.tobytes())))
        output.append(tokens(result)[request.slot])
        other.outputs.append(tokens(result)[other.slot])
    assert output == answer(text, params, 6, lambda _: mask)
    assert set(output) <= set(allowed)
    assert other.outputs == answer(prompt(2, 4), GREEDY, 6)


@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 1, 9, 1], [11, 1]])
def test_a_chunk_reports_the_prompt_logprobs_that_it_predicts(chunks: list[int]) -> None:
    text = prompt(3, 12)
    runner, plans = sim_runner(), PlanBuilder()
    request = plans.admit(text, greedy(prompt_logprobs=2))
    at, output = 0, 0
    for chunk in chunks:
        runner.execute_model(plans.step((request, chunk)))
        result = result_of(runner.sample_tokens(None))
        expected = range(at + 1, min(at + chunk + 1, len(text)))
        assert sorted(scores(result)) == [(request.slot, position) for position in expected]
        for (_, position), entry in scores(result).items():
            assert_scored(entry, text[:position], text[position], 2)
        at += chunk
        output = tokens(result).get(request.slot, -1)
    assert output == answer(text, GREEDY, 1)[0], "prompt logprobs change no token"


def test_outputs_of_a_resumed_request_get_no_prompt_logprobs() -> None:
    text, params = prompt(3, 8), greedy(prompt_logprobs=0, logprobs=0)
    before = answer(text, params, 3)
    runner, plans = sim_runner(), PlanBuilder()
    request = plans.admit(text + before, params, num_prompt=len(text))
    runner.execute_model(plans.step(request))
    result = result_of(runner.sample_tokens(None))
    assert sorted(scores(result)) == [(request.slot, position) for position in [*range(1, 8), 11]]
    assert all(len(entry.token_ids) == 1 for entry in scores(result).values())


def test_a_request_without_logprobs_gets_none() -> None:
    runner, plans = sim_runner(), PlanBuilder()
    runner.execute_model(plans.step(plans.admit(prompt(1, 4), greedy(logprobs=1)), plans.admit(prompt(2, 4))))
    assert list(scores(result_of(runner.sample_tokens(None)))) == [(0, 4)]
    runner.execute_model(plans.step(plans.admit(prompt(3, 4))))
    result = result_of(runner.sample_tokens(None))
    assert (result.logprobs, result.embeddings, result.embedding_slots) == (None, b"", b"")


# -- embeddings --------------------------------------------------------------------------------------------------


def embedded(result: ModelRunnerOutput) -> dict[int, bytes]:
    return EmbeddingRows.from_message(result).by_slot() if result.embeddings else {}


@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 1, 9, 1]])
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_chunks_do_not_change_an_embedding(pooling: Pooling, chunks: list[int]) -> None:
    """Beside a request that generates, and in a slot with an old sum."""
    text = prompt(3, 12)
    runner, plans = sim_runner(), PlanBuilder()
    request, other = plans.admit(text, pooling=pooling), plans.admit(prompt(2, 4))
    got: dict[int, bytes] = {}
    for i, chunk in enumerate(chunks):
        runner.execute_model(plans.step(other, (request, chunk)))
        result = result_of(runner.sample_tokens(None))
        got = embedded(result)
        assert bool(got) == (i == len(chunks) - 1)
        other.outputs.append(tokens(result)[other.slot])
    hidden = hidden_states(chain(text))
    expected = hidden[-1] if pooling is Pooling.LAST else hidden.mean(0, dtype=np.float64).astype(np.float32)
    assert got == {request.slot: expected.tobytes()}
    assert expected.shape == (HIDDEN_SIZE,)
    assert other.outputs == answer(prompt(2, 4), GREEDY, len(chunks))
    plans.release(request)
    again = plans.admit(prompt(4, 5), pooling=pooling)
    runner.execute_model(plans.step(again))
    result = result_of(runner.sample_tokens(None))
    assert embedded(result).keys() == {again.slot}
    assert unpack(result.embedding_slots).tolist() == [again.slot]


def test_a_mean_over_positions_that_came_from_the_prefix_cache_is_noticed() -> None:
    runner, plans = sim_runner(), PlanBuilder()
    first = plans.admit(prompt(3, 14))
    runner.execute_model(plans.step(first))
    runner.sample_tokens(None).get()
    late = plans.admit(prompt(3, 14), hit=8, share=first, pooling=Pooling.MEAN)
    runner.execute_model(plans.step(late))
    output = runner.sample_tokens(None)
    with pytest.raises(OracleError, match="a mean from 8 on, but 0 positions are summed"):
        output.get()
