"""`runahead replay DIR --SETTING VALUE` for a recorded engine: the production core against the fitted cost model."""

import importlib.util
import re
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from services.cli.app import run
from services.cli.what_if import predict
from services.config import ReplayConfig
from services.scheduler.recording import EventRecording
from services.scheduler.what_if import History
from services.scheduler.what_if.cost import MIN_STEPS
from tests.integration.scheduler.engine import engine

SIM = {"backend": "sim", "sim_step_ms": 4.0, "sim_decode_us": 100.0, "sim_vocab_size": 1000}
PROMPT = 96


@pytest.fixture(scope="module", params=["lengths", pytest.param("tokens", marks=pytest.mark.soak)])
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recording of sixteen requests."""
    directory = tmp_path_factory.mktemp("engine")
    settings = {
        "record": str(directory / "recordings"),
        "record_tokens": request.param == "tokens",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 128,
    }
    with engine(directory, settings, SIM) as running:
        client = running.connect()
        for number in range(16):
            prompt = [*range(PROMPT // 2), *([number] * (PROMPT // 2))]
            client.generate(number, prompt, SamplingParams(24, temperature=0.0))
        client.wait_finished(*range(16))
        assert set(running.stop()) == {0}
    return directory / "recordings"


def predicted(directory: Path, **changes: object) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures that the model gives for the recorded settings, and for the changed ones."""
    recording = EventRecording(directory)
    history = History.read(recording)
    config = ReplayConfig.model_validate(changes)
    table = predict(config, recording.header, history).table
    return {sides[1].name: sides[1].value for sides in table}, {sides[1].name: sides[2].value for sides in table}


def test_the_same_settings_change_nothing_and_few_blocks_preempt(recordings: Path) -> None:
    same, changed = predicted(recordings, batch_queue_depth=2)
    assert same == changed
    _, crowded = predicted(recordings, num_blocks=20)
    assert crowded["preemptions"] > same["preemptions"] == 0


def test_drafts_need_a_chance_and_make_fewer_steps(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}'
    assert run(["replay", str(recordings), "--speculative-config", drafts]) == 2
    assert "set --draft-acceptance" in capsys.readouterr().err
    same, accepted = predicted(recordings, speculative_config=drafts, draft_acceptance=1.0)
    _, rejected = predicted(recordings, speculative_config=drafts, draft_acceptance=0.0)
    assert accepted["ITL, mean"] < rejected["ITL, mean"] / 2
    assert same["ITL, mean"] <= rejected["ITL, mean"], "rows may have been measured as free"


def test_what_cannot_be_combined_is_refused(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--draft-acceptance", "0.5"]
    assert run(["replay", str(recordings), "--batching-policy", "phased", *drafts]) == 2
    assert "not --batching-policy phased" in capsys.readouterr().err
    for arguments, reason in (
        (
            ["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'],
            "does not tell what the eagle drafter alone costs",
        ),
        (["--num-blocks", "4"], "does not fit the KV cache"),
        (["--batching-policy", "other"], "there is no such policy"),
        (["--draft-acceptance", "0.5"], "--draft-acceptance needs drafts: set --speculative-config"),
        (["--chart", "chart.png"], "--chart draws a prediction: name a setting to change"),
    ):
        assert run(["replay", str(recordings), *arguments]) == 2
        err = capsys.readouterr().err
        assert reason in err
        assert err.count("\n") == 1


def test_what_the_recorded_backend_cannot_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"record": str(tmp_path / "recordings"), "max_model_len": 256, "batching_policy": "phased"}
    with engine(tmp_path, settings, {**SIM, "sim_rigid": True}) as running:
        client = running.connect()
        client.generate(0, [*range(16)], SamplingParams(MIN_STEPS + 8, temperature=0.0))
        client.wait_finished(0)
        assert set(running.stop()) == {0}
    assert run(["replay", str(tmp_path / "recordings"), "--batching-policy", "chunked"]) == 2
    out, err = capsys.readouterr()
    assert "on backend sim rigid" in out
    assert "a rigid device cannot mix prefill and decode" in err
    assert run(["replay", str(tmp_path / "recordings"), "--batch-queue-depth", "1"]) == 0


def test_the_command_prints_a_table_and_a_chart(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(recordings), "--batch-queue-depth", "1"]) == 0
    out = capsys.readouterr().out
    assert "what if: --batch-queue-depth 1" in out
    assert re.search(r"^ITL, mean +ms( +[\d.,]+){2} +([\d.,]+|-)( +[\d.,]+){2}( +[+-]\d+ %)?$", out, re.MULTILINE)
    assert re.search(r"^throughput +recorded █+$", out, re.MULTILINE)
    chart = tmp_path / "chart.png"
    status = run(["replay", str(recordings), "--batch-queue-depth", "1", "--chart", str(chart)])
    if importlib.util.find_spec("matplotlib") is None:
        assert (status, "--chart needs matplotlib" in capsys.readouterr().err) == (2, True)
    else:
        assert (status, chart.stat().st_size > 0) == (0, True)


def test_plan_gives_the_speeds_of_the_fitted_model(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(DEMO_MODEL), "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "32", "--record"]
    assert run([*command, str(tmp_path)]) == 0
    assert "no speeds are predicted: " in capsys.readouterr().out
    assert run([*command, str(recordings)]) == 0
    out, cost = capsys.readouterr().out, next(History.read(EventRecording(recordings)).costs())
    assert f"speeds by recording {EventRecording(recordings).incarnation} ({cost.num_steps:,} steps" in out
    for rows in (1, 4, 16, 32):
        seconds = cost.of_decodes(rows, 512)
        speed = f"{1e3 * seconds:.1f} ms a step, {rows / seconds:,.0f} tokens/s"
        assert f"  {rows} decodes with 512 tokens each: {speed}\n" in out
