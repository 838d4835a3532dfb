"""The directory of compiled kernels where the one beside the sources cannot be written: a read-only image, any uid."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.kernels.cpu import compile_cache as cache


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels compiled by somebody else: beside the sources, where we may not write."""
    for source in Path(cache.__file__).parent.glob("*.py"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    compiled = cache.directory()
    assert compiled.parent == tmp_path / "__pycache__"
    (compiled / "kernels_x").mkdir()
    (compiled / "kernels_x" / "attention.nbi").write_text("compiled")
    is_writable = cache.is_writable
    monkeypatch.setattr(cache, "is_writable", lambda place: place != compiled and is_writable(place))
    return compiled


def test_compiled_kernels_are_copied_to_the_users_cache_once(installed: Path, tmp_path: Path) -> None:
    place = cache.directory()
    assert place == tmp_path / "home" / "runahead" / installed.name
    assert (place / "kernels_x" / "attention.nbi").read_text() == "compiled"
    (place / "kernels_x" / "attention.nbi").write_text("recompiled for this processor")
    assert cache.directory() == place
    assert (place / "kernels_x" / "attention.nbi").read_text() == "recompiled for this processor"
    assert [path.name for path in place.parent.iterdir()] == [place.name], "no scratch is left"


def test_kernels_of_versions_that_are_not_used_any_more_are_removed(installed: Path, tmp_path: Path) -> None:
    place = cache.directory()
    for name, used in ((place.name, 0), ("kernels-old", 0), ("kernels-of-another-checkout", None), ("weights", 0)):
        (place.parent / name / "kernels_x").mkdir(parents=True, exist_ok=True)
        os.utime(place.parent / name, used if used is None else (used, used))
    assert cache.directory() == place
    assert {path.name for path in place.parent.iterdir()} == {place.name, "kernels-of-another-checkout", "weights"}


def test_another_worker_that_was_first_keeps_its_copy(installed: Path, tmp_path: Path) -> None:
    place = tmp_path / "home" / "runahead" / installed.name
    place.mkdir(parents=True)
    (place / "theirs").touch()
    cache.copy_compiled(installed, place)
    assert [path.name for path in place.iterdir()] == ["theirs"]
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_without_a_home_the_copy_is_private(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file, so that nothing can be made in it")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    place = cache.directory()
    assert place.parent == tmp_path
    assert place.name.startswith("runahead-kernels-")
    assert (place / "kernels_x" / "attention.nbi").read_text() == "compiled"
    for leave in at_exit:
        leave()
    assert not place.exists()
