"""Every sampling parameter on the simulator gives the tokens of the plain reference sampler."""

import msgspec
import numpy as np
import pytest

from protocol.codec import unpack
from protocol.rows import EmbeddingRows
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import ModelRunnerOutput
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE, hidden_states
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.batch.slots import PlanError
from tests.unit.worker.plans import (
    GREEDY,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    grammar_output,
    hold,
    prompt,
    result_of,
    sampled,
    sim_runner,
    tokens,
)
from tests.unit.worker.sim_reference import answer, assert_scored, chain, scores


def greedy(**params: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **params)


@pytest.mark.parametrize(
    "rule", [{"logit_bias": ((11, 40.0), (12, 40.0))}, {"min_tokens": 2, "stop_token_ids": tuple(range(1, VOCAB))}]
)
def test_the_slot_may_have_another_owner_when_the_device_samples(rule: dict[str, object]) -> None:
    """Immutable result: a row uses the parameters of its launch."""
    device, plans, text = SimDevice(), PlanBuilder(), prompt(1, 9)
    runner = sim_runner(make_device=lambda: device)

    def launch(request: SlotRequest) -> StepOutput:
        runner.execute_model(plans.step(request))
        return runner.sample_tokens(None)

    first = plans.admit(text, greedy(**rule, logprobs=2))
    hold(device)
    output = launch(first)
    plans.release(first, reuse_slot=True)
    second = plans.admit(prompt(2, 3))
    later = launch(second)
    assert second.slot == first.slot
    (token,) = answer(text, first.params, 1)
    assert [token] != answer(text, GREEDY, 1)
    assert tokens(output.get()) == {first.slot: token}
    assert_scored(scores(result_of(output))[first.slot, len(text)], text, token, 2)
    assert tokens(later.get()) == {second.slot: answer(prompt(2, 3), GREEDY, 1)[0]}
    assert result_of(later).logprobs is None
    runner.shutdown()


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
    allowed = {"wide": range(1, VOCAB), "narrow": range(0, VOCAB, 7), "one": [41], "only what is forbidden": [2]}[shape]
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    runner, plans = sim_runner(), PlanBuilder()
    request, other = plans.admit(text, params), plans.admit(prompt(2, 4))
    for _ in range(6):
        plan = plans.step(other, request, masked=[request])
        runner.execute_model(plan)
        runner.add_masks(grammar_output(plan, [request.slot], mask.tobytes()))
        result = result_of(runner.sample_tokens(None))
        output.append(tokens(result)[request.slot])
        other.outputs.append(tokens(result)[other.slot])
    assert output == answer(text, params, 6, lambda _: mask)
    assert set(output) <= set(allowed)
    assert other.outputs == answer(prompt(2, 4), GREEDY, 6)


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
    step = plans.step(late)
    with pytest.raises(PlanError, match="a mean from 8 on, but 0 positions are summed"):
        runner.execute_model(step)
