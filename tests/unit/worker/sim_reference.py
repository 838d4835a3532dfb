"""The simulator's expected answers, from the reference sampler and prefix hashes: no batch, no chunks, no device."""

from collections.abc import Callable

import numpy as np

from protocol.rows import LogprobRows
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput
from services.worker.backends.sim.model.hashing import SEED, PrefixHash
from services.worker.backends.sim.model.logits import Logits
from services.worker.sampling.reference import TokenLogprobs, logprobs_of, sample
from tests.unit.worker.plans import CONTEXT, VOCAB

HASH, LOGITS = PrefixHash(VOCAB, CONTEXT), Logits(VOCAB, ())
Mask = Callable[[list[int]], np.ndarray]


def chain(ids: list[int]) -> np.ndarray:
    return HASH.chunk(SEED, np.array(ids, np.int32))


def logits_after(ids: list[int]) -> np.ndarray:
    """Return float32[vocab], the model's logits after `ids`."""
    return LOGITS.rows(chain(ids)[-1:])[0]


def answer(ids: list[int], params: SamplingParams, count: int, mask: Mask | None = None) -> list[int]:
    """Return the tokens that the reference sampler samples after a prompt.

    Args:
        mask: returns the grammar's bitmask after the output tokens so far.
    """
    given, output = np.array(ids, np.int32), np.empty(0, np.int32)
    for _ in range(count):
        before = [*ids, *output.tolist()]
        token = sample(logits_after(before), params, given, output, mask(output.tolist()) if mask else None)
        output = np.append(output, np.int32(token))
    return [int(token) for token in output]


def scores(result: ModelRunnerOutput) -> dict[tuple[int, int], TokenLogprobs]:
    """Return the log-probabilities of a result by (slot, position)."""
    if result.logprobs is None:
        return {}
    rows, at, found = LogprobRows.from_message(result.logprobs), 0, {}
    for slot, position, count, token_rank in zip(*(c.tolist() for c in rows[:4]), strict=True):
        entry = TokenLogprobs(token_rank, rows.token_ids[at : at + count], rows.values[at : at + count])
        assert (slot, position) not in found
        found[slot, position] = entry
        at += count
    return found


def assert_scored(entry: TokenLogprobs, before: list[int], token: int, count: int) -> None:
    expected = logprobs_of(logits_after(before), token, count)
    assert entry.token_rank == expected.token_rank
    assert entry.token_ids.tolist() == expected.token_ids.tolist()
    assert entry.values.tobytes() == expected.values.tobytes()
