"""Limits of a container."""

from pathlib import Path

import pytest

from services.worker.machine import cores, free_memory


@pytest.mark.parametrize("statistics", ["", "anon 200\nfile 700\ninactive_file 500\nactive_file 100\nshmem 100\n"])
def test_free_memory_of_a_container_includes_its_page_cache(tmp_path: Path, statistics: str) -> None:
    for name, text in {"memory.max": "1000", "memory.current": "900", "memory.stat": statistics}.items():
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == (700 if statistics else 100)


@pytest.mark.parametrize("quota", ["max 100000", "50000 100000"])
def test_cores_of_a_container(tmp_path: Path, quota: str) -> None:
    unlimited = cores(tmp_path)
    (tmp_path / "cpu.max").write_text(quota)
    assert cores(tmp_path) == (unlimited if quota.startswith("max") else 1)


def test_limits_of_a_container_under_version_1_of_control_groups(tmp_path: Path) -> None:
    for name, text in {
        "memory/memory.limit_in_bytes": "1000",
        "memory/memory.usage_in_bytes": "900",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 100\n",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (free_memory(tmp_path), cores(tmp_path)) == (700, 1)
