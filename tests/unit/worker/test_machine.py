"""Limits of a container."""

from pathlib import Path

import pytest

from services.worker import machine


@pytest.mark.parametrize("statistics", ["", "anon 200\nfile 700\ninactive_file 500\nactive_file 100\nshmem 100\n"])
def test_free_memory_of_a_container_includes_its_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statistics: str
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in {"memory.max": "1000", "memory.current": "900", "memory.stat": statistics}.items():
        (tmp_path / name).write_text(text)
    assert machine.free_memory() == (700 if statistics else 100)


@pytest.mark.parametrize("quota", ["max 100000", "50000 100000"])
def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    unlimited = machine.cores()
    (tmp_path / "cpu.max").write_text(quota)
    assert machine.cores() == (unlimited if quota.startswith("max") else 1)


def test_limits_of_a_container_under_version_1_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in {
        "memory/memory.limit_in_bytes": "1000",
        "memory/memory.usage_in_bytes": "900",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 100\n",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (machine.free_memory(), machine.cores()) == (700, 1)
