"""The batched sampler, with every implementation, against one row at a time in plain float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protocol.steps import GrammarOutput
from services.worker.backends.native.sampling.sampler import Sampler
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import SlotTable
from services.worker.sampling import noise
from tests.unit.native.implementations import IMPLEMENTATIONS, make

F64 = NDArray[np.float64]
Sample = Callable[..., torch.Tensor]


@pytest.fixture(params=IMPLEMENTATIONS)
def sample(request: pytest.FixtureRequest) -> Sample:
    """The ids of a fresh sampler whose slots were assigned as a table says."""
    kernels = make(request.param)

    def ids(
        logits: torch.Tensor,
        slots: SlotTable,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        grammar: GrammarOutput | None = None,
    ) -> torch.Tensor:
        vocab_size = logits.shape[1]
        history = TokenHistory(slots.num_slots, slots.max_model_len, vocab_size, kernels)
        sampler = Sampler(slots, history, vocab_size, kernels)
        for slot in rows.tolist():
            sampler.assign(slot)
        return sampler.sample(logits, rows, positions, grammar).ids

    return ids


def table(rows: int, **columns: object) -> SlotTable:
    slots = SlotTable(num_slots=rows, block_size=16, num_blocks=4, max_model_len=64)
    slots.temperature[:] = 1.0
    for name, values in columns.items():
        getattr(slots, name)[:] = values
    return slots


def kept(logits: F64, temperature: float, min_p: float, top_k: int, top_p: float) -> F64:
    """Scaled logits; minus infinity for what is filtered. vLLM's order: temperature, min-p, top-k, top-p."""
    scaled = logits / temperature
    chances = np.exp(scaled - scaled.max())
    scaled = np.where(chances < min_p, -np.inf, scaled)
    if top_k:
        scaled = np.where(scaled < np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], -np.inf, scaled)
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        chances = np.exp(scaled[order] - scaled.max())
        above = (chances.cumsum() - chances) / chances.sum()
        last = max(1, int((above < top_p).sum()))
        scaled[order[last:]] = -np.inf
    return scaled


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_equals_the_float64_reference(sample: Sample, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = 64
    logits = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    columns = {
        "temperature": rng.choice([0.3, 1.0, 1.7], rows),
        "min_p": rng.choice([0.0, 0.1, 0.5], rows),
        "top_k": rng.choice([0, 1, 7, vocab - 1, vocab, vocab + 5], rows),
        "top_p": rng.choice([1.0, 0.9, 0.5, 0.01], rows),
        "seed": rng.integers(0, 2**64, rows, np.uint64),
    }
    positions = rng.integers(1, 60, rows, np.int32)
    ids = sample(torch.tensor(logits), table(rows, **columns), np.arange(rows, dtype=np.int32), positions)
    for row in range(rows):
        values = [float(np.float32(columns[k][row])) for k in ("temperature", "min_p")]
        scaled = kept(logits[row].astype(np.float64), *values, int(columns["top_k"][row]), float(columns["top_p"][row]))
        seeds, at = columns["seed"][row : row + 1], positions[row : row + 1]
        noisy = scaled + noise.gumbel(seeds, at, np.arange(vocab))[0]
        assert noisy[ids[row]] >= noisy.max() - 1e-5, columns["top_k"][row]


def test_a_row_does_not_depend_on_its_batch(sample: Sample) -> None:
    rng = np.random.default_rng(5)
    rows, vocab = 24, 2000
    logits = torch.tensor(rng.normal(0, 0.2, (rows, vocab)), dtype=torch.float32)
    slots = table(
        rows,
        temperature=np.where(np.arange(rows) % 3, 1.3, 0.0),
        top_p=rng.choice([1.0, 0.7, 0.999], rows),
        top_k=rng.choice([0, 50], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64),
    )
    positions = rng.integers(1, 60, rows, np.int32)
    together = sample(logits.clone(), slots, np.arange(rows, dtype=np.int32), positions)
    for row in range(rows):
        at = slice(row, row + 1)
        assert sample(logits[at].clone(), slots, np.array([row], np.int32), positions[at]) == together[row]


def test_greedy_takes_the_lowest_of_equal_maxima(sample: Sample) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    slots = table(2, temperature=0.0, top_k=3, top_p=0.5, min_p=0.9)
    assert sample(logits, slots, np.array([0, 1], np.int32), np.array([3, 3], np.int32)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "top_k": 2, "top_p": 0.9}], ids=str
)
def test_where_nothing_is_left_it_is_the_first_token(sample: Sample, filters: dict[str, float]) -> None:
    logits = torch.full((2, 70), -torch.inf)
    slots = table(2, seed=7, **filters)
    slots.temperature[1] = 0.0
    assert sample(logits, slots, np.array([0, 1], np.int32), np.array([3, 3], np.int32)).tolist() == [0, 0]
