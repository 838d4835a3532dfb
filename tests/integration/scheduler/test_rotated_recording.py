"""A recording whose first segments were deleted replays from a moment in which no request was open."""

from pathlib import Path
from random import Random

import pytest

from protocol.sampling import SamplingParams
from services.cli.app import run
from services.scheduler.core.observer import CoreRestarted
from services.scheduler.recording import EventRecording
from tests.integration.scheduler.engine import engine

SIM = {"backend": "sim", "sim_step_ms": 0.0, "sim_prefill_token_us": 0.0, "sim_vocab_size": 30_000}
MAX_BYTES = 1 << 20
PROMPT = 1500
"""Tokens. Random ones, and ids of blocks, are hardly compressed, so few requests fill a segment."""
MOST_ROUNDS = 1000


@pytest.mark.parametrize("has_tokens", [False, True], ids=["lengths", "tokens"])
def test_the_core_is_restarted_and_replays_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_tokens: bool
) -> None:
    directory, rng = tmp_path / "recordings", Random(1)
    settings = {
        "record": str(directory),
        "record_max_bytes": MAX_BYTES,
        "record_tokens": has_tokens,
        "max_model_len": 2048,
        "block_size": 4,
        "num_gpu_blocks_override": 4096,
    }
    common = [rng.randrange(30_000) for _ in range(64)]
    with engine(tmp_path, settings, SIM) as running:
        client = running.connect()
        for first in range(0, 4 * MOST_ROUNDS, 4):
            for number in range(first, first + 4):
                prompt = common + [rng.randrange(30_000) for _ in range(PROMPT)]
                client.generate(number, prompt, SamplingParams(8, temperature=0.0))
            client.wait_finished(*range(first, first + 4))
            if not list(directory.glob("*-000000.recording")):
                break
        assert set(running.stop()) == {0}
    assert sum(file.stat().st_size for file in directory.iterdir()) <= MAX_BYTES
    recording = EventRecording(directory)
    assert isinstance(next(recording.records_from_start()), CoreRestarted)
    assert run(["replay", str(directory)]) == 0
    out = capsys.readouterr().out
    assert f"from segment {recording.first_start}: " in out
    assert "equal: " in out
