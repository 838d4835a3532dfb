"""Files of packed weights: what is read is what was written, whatever happened to the files."""

import fcntl
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from services.worker.kernels.packed_weight import PackedRows, PackedWeight
from services.worker.weights import packed
from services.worker.weights.contents import known_contents
from services.worker.weights.packed import LEFT_BEHIND_SECONDS, SUFFIX, TEMPORARY, PackedFile, PackedWeights
from tests.unit.worker.damage import cut, extended, flipped

LIMIT = 1 << 30
CONTENTS = {"one[0:64, 0:32] Q8_0": "0a", "norm[0:32] float32": "0b"}


def rows(number: int, size: int = 64) -> PackedRows:
    generator = torch.Generator().manual_seed(number)
    return PackedRows("Q8_0", size, 32, torch.randint(1, 256, (size // 16, 8, 16), generator=generator).byte())


def weights(count: int = 2) -> dict[str, PackedWeight]:
    plain = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))
    exact = PackedRows("float32 products", 64, 32, plain.bfloat16())
    return {"both": (rows(0), exact), "whole": (PackedRows("float32 products", 60, 32, plain),)} | {
        f"layer {number}": (rows(number),) for number in range(1, count)
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def packed_file(
    directory: Path, identity: str = "model", name: str = "m", limit: int = LIMIT, least: int = 0
) -> PackedFile:
    return PackedFile(directory, name, identity, limit, least)


def keep(file: PackedFile, made: dict[str, PackedWeight], is_current: bool = True, waits: bool = True) -> None:
    collected = PackedWeights()
    collected.types = {"Q8_0"}
    for name, weight in made.items():
        collected.get(name, lambda weight=weight: weight)
    file.keep(collected, known_contents(CONTENTS), lambda: is_current)
    if waits:
        file.wait()


def read(file: PackedFile) -> PackedWeights:
    return file.read(lambda phase, fraction: None)


def is_whole(found: PackedWeights, made: dict[str, PackedWeight]) -> bool:
    """Return whether it is all, with the same bits; else it is nothing."""
    if not found.weights:
        assert not found.contents
        return False
    assert found.contents == CONTENTS
    assert found.types == {"Q8_0"}
    assert list(found.weights) == list(made)
    for one, other in zip(found.weights.values(), made.values(), strict=True):
        assert [each[:3] for each in one] == [each[:3] for each in other]
        for mine, expected in zip(one, other, strict=True):
            assert mine.memory.dtype == expected.memory.dtype
            assert torch.equal(mine.memory, expected.memory)
            assert mine.memory.data_ptr() % 64 == 0
    return True


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def test_another_process_gets_the_same_arrays_and_makes_none(directory: Path) -> None:
    keep(packed_file(directory), weights())
    found = read(packed_file(directory))
    assert is_whole(found, weights())
    found.get("both", lambda: pytest.fail("it is there"))
    assert not found.num_made
    found.get("new", lambda: (rows(5),))
    assert found.num_made == 1
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in files(directory)] == [0o600]


def test_weights_without_a_layout_of_ours_are_made_each_time(directory: Path) -> None:
    collected, plain = PackedWeights(), torch.ones(3)
    assert [collected.get("plain", lambda: plain) is plain for _ in range(2)] == [True, True]
    assert not collected.weights
    packed_file(directory).keep(collected, {}, lambda: True)
    assert not directory.exists()


def test_small_weights_and_those_of_files_that_changed_meanwhile_are_not_kept(directory: Path) -> None:
    keep(packed_file(directory, least=1 << 20), weights())
    keep(packed_file(directory), weights(), is_current=False)
    assert not directory.exists()


def test_another_identity_is_missing_and_replaces_the_file(directory: Path) -> None:
    keep(packed_file(directory), weights())
    other = packed_file(directory, "model of another size, time or inode")
    assert not is_whole(read(other), weights())
    assert is_whole(read(packed_file(directory)), weights()), "the file stays until it is replaced"
    keep(other, weights(3))
    assert is_whole(read(other), weights(3))
    assert not is_whole(read(packed_file(directory)), weights())
    assert len(files(directory)) == 1


def _zeroed(data: bytes, rng: Random) -> bytes:
    """A page that never reached the disk."""
    at = rng.randrange(len(data) // 512) * 512
    return data[:at] + bytes(512) + data[at + 512 :]


def _shorter_data(data: bytes, rng: Random) -> bytes:
    """The header is whole."""
    at = rng.randrange(1, 4096)
    return data[at:]


def _foreign(data: bytes, rng: Random) -> bytes:
    return rng.randbytes(len(data)) if rng.random() < 0.9 else b""


@pytest.mark.parametrize("damage", [cut, flipped, extended, _zeroed, _shorter_data, _foreign])
def test_a_damaged_file_is_missing_and_is_removed(directory: Path, damage: Callable[[bytes, Random], bytes]) -> None:
    file = packed_file(directory)
    keep(file, weights())
    [path] = files(directory)
    whole, rng = path.read_bytes(), Random(damage.__name__)
    removed = 0
    for _ in range(200):
        path.write_bytes(damage(whole, rng))
        # Bytes between two arrays belong to none of them.
        removed += not is_whole(read(file), weights())
        assert path.exists() == bool(read(file).weights)
    assert removed > 50
    keep(file, weights())
    assert path.read_bytes() == whole


def test_a_link_and_a_directory_in_place_of_the_file_are_missing(directory: Path, tmp_path: Path) -> None:
    file = packed_file(directory)
    keep(file, weights())
    [path] = files(directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not is_whole(read(file), weights())
    path.unlink(missing_ok=True)
    path.mkdir()
    assert not is_whole(read(file), weights())
    keep(file, weights())  # does not raise


def in_child(body: Callable[[], object]) -> int:
    """Return the exit status of a process that runs `body`, or the negative number of its signal."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_writer_may_be_killed_at_any_array(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one writes the file whole."""
    made, plain = weights(6), packed.checksum_of
    for last in range(8):
        count = iter(range(last))

        def dies(words: object, count: Iterator[int] = count) -> int:
            if next(count, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(words)

        monkeypatch.setattr(packed, "checksum_of", dies)
        ended = in_child(lambda: keep(packed_file(directory), made))
        monkeypatch.setattr(packed, "checksum_of", plain)
        is_there = is_whole(read(packed_file(directory)), made)
        assert (ended, is_there) == ((-signal.SIGKILL, False) if last < 8 else (0, True))
        assert [path.name for path in files(directory)] == [f"{TEMPORARY}m{SUFFIX}"]
    assert in_child(lambda: keep(packed_file(directory), made)) == 0
    assert is_whole(read(packed_file(directory)), made)
    assert len(files(directory)) == 1


def test_several_writers_of_the_same_file(directory: Path) -> None:
    made, children = weights(50), []
    for _ in range(4):
        if (child := os.fork()) == 0:
            keep(packed_file(directory), made)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert is_whole(read(packed_file(directory)), made)
    assert len(files(directory)) == 1


def test_what_another_process_writes_is_not_written_twice(directory: Path) -> None:
    directory.mkdir(0o700)
    temporary = directory / f"{TEMPORARY}m{SUFFIX}"
    with temporary.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(b"half")
        stream.flush()
        keep(packed_file(directory), weights())
        assert files(directory) == [temporary]
        assert temporary.read_bytes() == b"half"
    keep(packed_file(directory), weights())
    assert is_whole(read(packed_file(directory)), weights())


@pytest.mark.parametrize(("patience", "is_kept"), [(0.0, False), (0.1, False), (60.0, True)])
def test_a_worker_that_leaves_waits_for_the_file_so_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch, patience: float, is_kept: bool
) -> None:
    plain = packed.checksum_of
    monkeypatch.setattr(packed, "checksum_of", lambda words: (time.sleep(0.1), plain(words))[1])
    file = packed_file(directory)
    keep(file, weights(6), waits=False)
    file.end(patience)
    assert [path.name for path in files(directory)] == ([f"m{SUFFIX}"] if is_kept else [])
    assert is_whole(read(packed_file(directory)), weights(6)) == is_kept


def test_the_files_used_last_stay_within_the_limit(directory: Path) -> None:
    keep(packed_file(directory, name="m0"), weights())
    size = sum(each.memory.nbytes for weight in weights().values() for each in weight)
    limit, now = 3 * files(directory)[0].stat().st_size, time.time()
    for number in range(3):
        keep(packed_file(directory, name=f"m{number}", limit=limit), weights())
        os.utime(directory / f"m{number}{SUFFIX}", (now - 100 + number, now - 100 + number))
    (directory / "notes.txt").write_text("not weights")
    left = directory / f"{TEMPORARY}old{SUFFIX}"
    left.write_bytes(b"half")
    os.utime(left, (0, now - LEFT_BEHIND_SECONDS - 1))
    assert is_whole(read(packed_file(directory, name="m0")), weights()), "it is used"
    keep(packed_file(directory, name="m3", limit=limit), weights())
    assert [path.name for path in files(directory)] == [f"m{i}{SUFFIX}" for i in (0, 2, 3)] + ["notes.txt"]
    keep(packed_file(directory, name="m4", limit=size - 1), weights())
    assert not is_whole(read(packed_file(directory, name="m4")), weights()), "it is larger than the limit"
    assert len(files(directory)) == 4, "nothing is removed for it"


def test_half_of_the_free_disk_stays_free(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(each.memory.nbytes for weight in weights().values() for each in weight)
    usage = shutil.disk_usage("/")
    for free, is_kept in ((2 * size - 2, False), (2 * size + 2, True)):
        monkeypatch.setattr(packed, "disk_usage", lambda path, free=free: usage._replace(free=free))
        keep(packed_file(directory), weights())
        assert is_whole(read(packed_file(directory)), weights()) == is_kept


def test_a_full_disk_means_that_nothing_is_kept(directory: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        keep(packed_file(directory), weights())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(directory) == []
    keep(packed_file(directory), weights())
    assert is_whole(read(packed_file(directory)), weights())


def test_a_directory_that_cannot_be_written_is_read() -> None:
    """In a process of another user, as root may write everywhere."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    directory = base / "weights"

    def read_and_write() -> None:
        if os.geteuid() == 0:
            for path in [directory, *directory.rglob("*")]:
                os.chown(path, 65534, 65534)
            os.setuid(65534)
        directory.chmod(0o500)
        assert is_whole(read(packed_file(directory)), weights())
        keep(packed_file(directory, "another"), weights())
        assert len(files(directory)) == 1

    try:
        base.chmod(0o755)
        keep(packed_file(directory), weights())
        assert in_child(read_and_write) == 0
    finally:
        directory.chmod(0o700)
        shutil.rmtree(base)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_reach_is_not_used(
    directory: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keep(packed_file(directory), weights())
    directory.chmod(mode)
    assert not is_whole(read(packed_file(directory)), weights())
    keep(packed_file(directory, name="other"), weights())
    assert len(files(directory)) == 1
    assert "chmod 700" in caplog.text
