"""A directory of KV blocks: what is read is what was written, whatever happened to the files."""

import errno
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from services.cli.preflight import check_tiers
from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.worker.runner import LoadError
from services.worker.tiers.disk import BETWEEN_SCANS, KEPT, LEFT_BEHIND_SECONDS, RETRY_SECONDS, TEMPORARY, DiskTier
from tests.unit.worker.damage import cut, extended, flipped

SIZE = 1000
"""Bytes of a block."""


def name(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def content(number: int) -> memoryview:
    return memoryview(Random(number).randbytes(SIZE))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def tier(directory: Path, identity: str = "model", max_bytes: int = 1 << 20) -> DiskTier:
    return DiskTier(str(directory), identity, max_bytes)


def read(tier: DiskTier, number: int) -> bytes | None:
    buffer = memoryview(bytearray(SIZE))
    return bytes(buffer) if tier.get(name(number), buffer) else None


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_another_process_finds_the_blocks_of_the_same_model_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tier(directory)
    for number in range(20):
        first.put(name(number), content(number))
    monkeypatch.setenv("HOME", str(directory.parent))
    second = tier(Path("~/kv"))
    assert [read(second, number) for number in range(20)] == [bytes(content(number)) for number in range(20)]
    assert not second.has(name(20))
    assert read(second, 20) is None
    assert read(tier(directory, "another model"), 0) is None
    modes = {path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")] if path.is_dir()}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files(directory)} == {0o600}


def _zeroed(data: bytes, rng: Random) -> bytes:
    """Pages that never reached the disk."""
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data) - at) if any(data[at:]) else b""


def _foreign(data: bytes, rng: Random) -> bytes:
    return rng.randbytes(len(data))


@pytest.mark.parametrize("damage", [cut, flipped, extended, _zeroed, _foreign])
def test_a_damaged_file_is_missing_and_is_written_again(
    directory: Path, damage: Callable[[bytes, Random], bytes]
) -> None:
    kept = tier(directory)
    kept.put(name(1), content(1))
    [path] = files(directory)
    whole, rng = path.read_bytes(), Random(damage.__name__)
    for _ in range(200):
        path.write_bytes(damage(whole, rng))
        assert read(kept, 1) is None
        assert not path.exists(), "it is removed"
        kept.put(name(1), content(1))
        assert path.read_bytes() == whole
    assert kept.changes.take() == (name(1) * 201, name(1) * 200)


def test_a_file_of_another_block_model_or_version_is_missing(directory: Path) -> None:
    kept, other = tier(directory), tier(directory, "another model")
    kept.put(name(1), content(1))
    [path] = files(directory)
    whole = path.read_bytes()
    other.put(name(1), content(2))
    [foreign] = set(files(directory)) - {path}
    kept.put(name(2), content(2))
    [another] = set(files(directory)) - {path, foreign}
    for wrong in (foreign.read_bytes(), another.read_bytes(), b"RUNAKV2\n" + whole[8:], b""):
        path.write_bytes(wrong)
        assert read(kept, 1) is None
        path.write_bytes(whole)
    assert read(kept, 1) == bytes(content(1))
    path.unlink()
    path.symlink_to(another)
    assert read(kept, 1) is None, "no link is followed"
    path.unlink()
    path.mkdir()
    assert read(kept, 1) is None
    kept.put(name(1), content(1))  # does not raise


def test_the_files_used_last_stay_within_the_limit(directory: Path) -> None:
    most = 50 * SIZE
    kept = tier(directory, max_bytes=most)
    kept.put(name(0), content(0))
    [own] = files(directory)
    foreign = [directory / "notes.txt", directory / "photos" / own.parent.name / own.name, own.with_name("notes.txt")]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not a block")
    writing = own.with_name(f"{TEMPORARY}2")
    writing.write_bytes(b"half")
    tier(directory, "another model").put(name(0), content(0))
    now = time.time()
    for path in {*files(directory)} - {own}:
        os.utime(path, (now - 595, now - 595))
    for number in range(100):
        kept.put(name(number), content(number))
        for path in files(directory):  # an earlier moment for each, in order
            if path not in foreign and path.stat().st_mtime > now - 400:
                os.utime(path, (now - 590 + number, now - 590 + number))
        assert read(kept, 0) is not None, "what is read stays"
        assert sum(path.stat().st_size for path in files(directory) if path not in foreign) <= most
    assert {path.read_text() for path in foreign} == {"not a block"}
    assert not writing.exists()
    found = [number for number in range(100) if kept.has(name(number))]
    assert found[1:] == list(range(found[1], 100)), "the newest"
    left = [name(number) for number in range(100) if number not in found]
    assert kept.changes.take() == (name(0) + b"".join(map(name, range(100))), b"".join(left)), "its own model's"
    assert len(found) > KEPT * 50 * SIZE / (SIZE + 100) - 3
    assert read(tier(directory, "another model"), 0) is None, "the least recently used one is of another model"


def test_bytes_are_those_of_the_files_that_are_left(directory: Path) -> None:
    kept, early = tier(directory), tier(directory)
    assert kept.num_bytes == 0, "not looked at yet"
    kept.begin()
    early.begin()
    for number in range(4):
        kept.put(name(number), content(number))
    for number in (0, 1, 9):
        kept.drop(name(number))
    assert kept.changes.take() == (b"".join(map(name, range(4))), name(0) + name(1))
    assert kept.num_bytes == sum(path.stat().st_size for path in files(directory))
    other = tier(directory)
    other.begin()
    for number in (2, 3):
        kept.drop(name(number))
        other.drop(name(number))
    assert kept.num_bytes == 0
    kept.put(name(5), content(5))
    early.drop(name(5))
    assert early.num_bytes == 0, "it has not seen the block that it drops"


def test_engines_that_share_a_directory_stay_within_the_limit_together(directory: Path) -> None:
    most = 100 * SIZE
    engines = [tier(directory, identity, most) for identity in ("one", "two", "three")]
    for number in range(300):
        engines[number % 3].put(name(number), content(number))
        if number % 25 == 0:
            assert sum(path.stat().st_size for path in files(directory)) <= most * (1 + 3 * BETWEEN_SCANS)


def test_a_write_that_was_killed_is_removed_later(directory: Path) -> None:
    kept = tier(directory)
    kept.put(name(1), content(1))
    left = files(directory)[0].with_name(f"{TEMPORARY}1")
    left.write_bytes(b"half")
    tier(directory).put(name(2), content(2))
    assert left.exists(), "its writer may be alive"
    os.utime(left, (0, time.time() - LEFT_BEHIND_SECONDS - 1))
    tier(directory).put(name(3), content(3))
    assert not left.exists()


def test_two_engines_whose_processes_have_the_same_number_write_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a volume. Both blocks are in one subdirectory."""
    one, other, buffer = tier(directory), tier(directory), memoryview(bytearray(SIZE))
    first, second = b"\1" * 32, b"\1" * 31 + b"\2"
    rename = Path.rename

    def after_the_other(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        assert not one.has(first), "a process that is killed here leaves no part of it"
        other.put(second, content(2))
        return path.rename(target)

    monkeypatch.setattr(Path, "rename", after_the_other)
    one.put(first, content(1))
    assert one.get(first, buffer)
    assert buffer == content(1)
    assert one.get(second, buffer)
    assert buffer == content(2)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files cannot grow beyond half a block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_writing_for_a_while(
    directory: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tier(directory)
    kept.put(name(1), content(1))
    assert files(directory) == []
    assert read(kept, 1) is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kept.put(name(1), content(1))
    assert not kept.has(name(1)), "it was tried just now"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RETRY_SECONDS)
    kept.put(name(1), content(1))
    assert read(kept, 1) == bytes(content(1))


def test_a_directory_that_cannot_be_written_is_read() -> None:
    """In a process of another user, as root may write everywhere."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        base.chmod(0o755)
        directory = base / "kv"
        tier(directory).put(name(1), content(1))
        if (child := os.fork()) == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    for path in [directory, *directory.rglob("*")]:
                        os.chown(path, 65534, 65534)
                    os.setuid(65534)
                for path in [directory, *directory.rglob("*")]:
                    path.chmod(0o500 if path.is_dir() else 0o400)
                kept = tier(directory)
                kept.put(name(2), content(2))
                with pytest.raises(ConfigurationError, match="this user cannot write it"):  # before `serve` starts it
                    check_tiers(ServeConfig(kv_offload_dir=str(directory)))
                status = int(read(kept, 1) != bytes(content(1)) or kept.has(name(2)))
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        for path in base.rglob("*"):
            path.chmod(0o700)
        shutil.rmtree(base)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_reach_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(LoadError, match="chmod 700"):
        tier(directory)


def test_a_path_that_is_no_directory_is_refused(directory: Path) -> None:
    directory.write_text("a file")
    with pytest.raises(LoadError, match=r"--kv-offload-dir .*kv: File exists"):
        tier(directory)
    with pytest.raises(LoadError, match=r"--kv-offload-dir .*inner: Not a directory"):
        tier(directory / "inner")


def test_a_directory_that_cannot_be_read_has_no_block(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    blocks = tier(directory)
    monkeypatch.setattr(os, "stat", fails)
    assert not blocks.has(name(1)), "the thread that writes goes on"
