"""The version of a source tree that is not installed."""

import pytest

from services import release


def test_a_source_tree_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is looked up by another name, because pip has installed it."""
    monkeypatch.setattr(release, "DISTRIBUTION", "runahead-engine-that-is-not-installed")
    release.version.cache_clear()
    assert release.version() == release.NOT_INSTALLED
    release.version.cache_clear()
