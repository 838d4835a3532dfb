"""Where a model's files come from: a directory, the hub's cache, or the demo model."""

import subprocess
import sys
from pathlib import Path

import pytest

from services import checkpoint
from services.checkpoint import CheckpointError, default_dtype, resolve

COMMIT = "0123456789012345678901234567890123456789"


def offline(cache: Path, *arguments: str) -> str:
    """What `resolve` says in a process whose hub is offline and whose cache is `cache`."""
    code = (
        "import sys; from services.checkpoint import *\n"
        "try: print(resolve(*sys.argv[1:]))\n"
        "except CheckpointError as error: print('refused:', error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, *arguments]
    root = Path(checkpoint.__file__).parents[1]
    return subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as the hub's client leaves it, with one model."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    for name in ("main", "v2"):
        (refs / name).write_text(COMMIT)
    return tmp_path


def test_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_no_model_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "DEMO_MODEL", tmp_path)
    assert resolve("") == tmp_path
    assert default_dtype("") == default_dtype(str(tmp_path)) == "float32"
    assert default_dtype("some/model") is None
    monkeypatch.setattr(checkpoint, "DEMO_MODEL", tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the demo model is missing at"):
        resolve("")


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "~/no-such-model", "a/b/c"])
def test_path_that_is_no_directory(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        resolve(name)


def test_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(CheckpointError, match="no such model directory"):
        resolve(str(file))


def test_hub_name_comes_from_the_cache_when_offline(cache: Path) -> None:
    assert offline(cache, "some/model").endswith(COMMIT)
    assert offline(cache, "some/model", "v2").endswith(COMMIT)


def test_hub_name_that_was_never_downloaded(cache: Path) -> None:
    said = offline(cache, "other/model")
    assert said.startswith("refused: model other/model: no such directory, not in the hub's cache")
    assert "HF_HUB_OFFLINE is set" in said
    assert "revision v3" in offline(cache, "some/model", "v3")


def test_name_that_no_hub_has(cache: Path) -> None:
    assert "not a valid name on the hub" in offline(cache, "we ird/na me")
