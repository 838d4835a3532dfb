"""Models from a hub: a GGUF file is chosen by its quantisation, downloaded alone, and served; later without the hub."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hub import LocalHub, local_hub
from tests.e2e.server import serving
from tests.integration.native import gguf_models
from tests.integration.native.conftest import Family

TINY = "some/tiny-GGUF"
KINDS = ("F16", "BF16", "Q4_0", "Q8_0")
OTHERS = {
    "some/names": ["a.Q4_K.gguf", "a.Q4_K_M.gguf", "mmproj-a.gguf", "config.json"],
    "some/parts": ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"],
    "some/mixed": ["a-q4_0.gguf", "model.safetensors", "config.json", "tokenizer.json"],
}
PROMPT = [5, 9, 250, 17, 3]
TOKENS = 8
RESOLVE = """
import json, sys
from services.checkpoint import CheckpointError, resolve
def outcome(model):
    try:
        return resolve(model).name
    except CheckpointError as error:
        return f"refused: {error}"
print(json.dumps([outcome(model) for model in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    directory = tmp_path_factory.mktemp("gguf")
    return {kind: gguf_models.write(directory / f"tiny-{kind}.gguf", "llama", kind) for kind in KINDS}


@pytest.fixture
def hub(families: dict[str, Family]) -> Iterator[LocalHub]:
    tiny = {family.path.name: family.path.read_bytes() for family in families.values()}
    others = {name: {file: file.encode() for file in files} for name, files in OTHERS.items()}
    with local_hub({TINY: tiny, **others}) as hub:
        yield hub


def resolved(models: list[str], **environment: str) -> dict[str, str]:
    """Return the names of the files that `resolve` returns, or its refusals, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(models)],
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return dict(zip(models, json.loads(done.stdout), strict=True))


def test_quantisation_chooses_one_file_and_only_that_is_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    files = {
        f"{TINY}:F16": "tiny-F16.gguf", f"{TINY}:q8_0": "tiny-Q8_0.gguf", "some/names:Q4_K": "a.Q4_K.gguf",
        "some/names:Q4_K_M": "a.Q4_K_M.gguf", "some/mixed:Q4_0": "a-q4_0.gguf",
    }  # fmt: skip
    assert resolved(list(files), **hub.environment(tmp_path)) == files
    assert {file for file in hub.downloads if not file.endswith(".json")} == {
        f"{model.partition(':')[0]}/{file}" for model, file in files.items()
    }


def test_choices_that_fit_no_file_or_several_are_refused_with_the_names(hub: LocalHub, tmp_path: Path) -> None:
    refusals = resolved(
        [TINY, f"{TINY}:Q4", "some/names:a", "some/parts:Q8_0", "some/absent:Q8_0"], **hub.environment(tmp_path)
    )
    several, missing, ambiguous, parts, absent = refusals.values()
    assert "several GGUF files" in several
    assert f"as in {TINY}:Q4_K_M: tiny-BF16.gguf, tiny-F16.gguf" in several
    assert "no such GGUF file" in missing
    assert "tiny-Q8_0.gguf" in missing
    assert "several GGUF files" in ambiguous
    assert "divided into 2 files, which is not supported" in parts
    assert "no such directory or repository on the hub" in absent
    assert not any(file.endswith(".gguf") for file in hub.downloads)


def test_a_name_without_a_hub_is_refused_in_one_line_before_any_service_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for variable, reason in (
        ({"HF_ENDPOINT": f"http://127.0.0.1:{port}"}, f"the hub cannot be reached (127.0.0.1 port {port})"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "serve", "example/model"],
            env={**os.environ, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1", **variable},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"model example/model: no such directory, not in the hub's cache, and {reason}" in done.stderr


def test_chosen_file_is_served_and_found_again_without_the_hub(
    hub: LocalHub, families: dict[str, Family], tmp_path: Path
) -> None:
    model, environment = f"{TINY}:Q4_0", hub.environment(tmp_path)
    arguments = model, "--dtype=float32", f"--kv-cache-memory-bytes={1 << 20}"
    with serving(*arguments, **environment) as running, running.client() as client:
        name = client.models.list().data[0].id
        answer = client.completions.create(
            model=name, prompt=PROMPT, temperature=0, max_tokens=TOKENS,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ).choices[0]  # fmt: skip
    assert name == model
    assert (answer.model_extra or {})["token_ids"] == families["Q4_0"].reference(PROMPT, TOKENS)[0]
    assert set(hub.downloads) == {f"{TINY}/tiny-Q4_0.gguf"}
    offline = resolved([model, f"{TINY}:F16"], **environment, HF_HUB_OFFLINE="1")
    assert offline[model] == "tiny-Q4_0.gguf"
    assert offline[f"{TINY}:F16"].startswith("refused: ")
