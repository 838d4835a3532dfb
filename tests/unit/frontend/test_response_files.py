"""Bounds and modes of the files of responses."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from services.cli.preflight import check
from services.cli.settings import ConfigurationError
from services.config import FrontendConfig
from services.frontend.errors import APIError
from services.frontend.responses_api.files import MAX_SECONDS, ResponseFiles, conversation_of, response_files
from services.frontend.responses_api.items import new_id
from services.frontend.responses_api.response_file import Origin, StoredHead, follow_file
from services.frontend.responses_api.schemas import InputMessage

GIVEN = [InputMessage(role="user", content="Hi")]
BLOCK = 4096


def added(files: ResponseFiles, directory: Path, tenant: str, age: float) -> str:
    """Store a response of less than a block. Return its id."""
    id = new_id("resp")
    part = {"type": "output_text", "text": "x"}
    response: Any = {"id": id, "output": [{"type": "message", "role": "assistant", "content": [part]}]}
    files.add(tenant, StoredHead.of(GIVEN, GIVEN), response)
    (path,) = directory.glob(f"*/{id}.jsonl")
    os.utime(path, (time.time() - age,) * 2)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    return id


def is_stored(files: ResponseFiles, tenant: str, id: str) -> bool:
    try:
        files.get(tenant, id)
    except APIError:
        return False
    return True


def test_stored_response_is_that_which_was_added(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path)
    id = added(files, tmp_path, "", 0)
    found = files.get("", id)
    assert conversation_of(found)[:2] == [*GIVEN, *GIVEN]
    assert found.head.given() == GIVEN
    assert len(conversation_of(found)) == 3
    files.delete("", id)
    with pytest.raises(APIError):
        files.delete("", id)


def test_old_files_are_deleted(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path)
    ids = {key: added(files, tmp_path, key, MAX_SECONDS + age) for key, age in (("a", -60), ("b", 60), ("c", -30))}
    files.prune()
    assert [key for key, id in ids.items() if is_stored(files, key, id)] == ["a", "c"]


def test_files_of_others_in_the_directory_are_kept(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path, max_files=0)
    id = added(files, tmp_path, "a", 0)
    (folder,) = tmp_path.iterdir()
    others = [tmp_path / "photos" / "a.jpg", folder / "b.jpg", folder / "directory"]
    others[0].parent.mkdir()
    others[2].mkdir()
    for path in others[:2]:
        path.touch()
        os.utime(path, (0, 0))
    files.prune()
    assert all(path.exists() for path in others)
    assert not is_stored(files, "a", id)


@pytest.mark.parametrize("bounds", [{"max_bytes": 6 * BLOCK}, {"max_files": 6}])
def test_the_key_that_has_most_loses_its_oldest(tmp_path: Path, bounds: Any) -> None:
    files = ResponseFiles(tmp_path, **bounds)
    few = [added(files, tmp_path, "few", 500 + age) for age in range(2)]
    many = [added(files, tmp_path, "many", age) for age in range(9)]
    files.prune()
    assert all(is_stored(files, "few", id) for id in few)
    assert [is_stored(files, "many", id) for id in many] == [True] * 4 + [False] * 5


def test_giant_is_not_stored(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path, max_bytes=6 * BLOCK)
    id = added(files, tmp_path, "", 0)
    text = [InputMessage(role="user", content="x" * 7 * BLOCK)]
    giant: Any = {"id": new_id("resp"), "output": []}
    files.add("", StoredHead.of([], text), giant)
    with pytest.raises(APIError, match="larger than the store"):
        files.new_run("", new_id("resp"), StoredHead.of([], text, Origin("", "demo", 0, b"", b"")))
    files.prune()
    assert (is_stored(files, "", id), is_stored(files, "", giant["id"])) == (True, False)


def test_unusable_directory_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    config = FrontendConfig(response_store_dir="~/file")
    with pytest.raises(FileExistsError), response_files(config):
        pass
    with pytest.raises(ConfigurationError, match=rf"--response-store-dir {tmp_path}/file: File exists"):
        check(config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~no-user").touch()
    with pytest.raises(ConfigurationError, match="--response-store-dir ~no-user/x: Not a directory"):
        check(FrontendConfig(response_store_dir="~no-user/x"))


async def test_reader_of_a_torn_line_gets_what_replaces_it(tmp_path: Path) -> None:
    first, second = (b'{"events":"event: a\\ndata: %d\\n\\n"}\n' % number for number in range(2))
    path = tmp_path / "file"
    path.write_bytes(b'{"conversation":[],"num_given":1}\n' + first + second[:-9])
    whole = path.stat().st_size - len(second[:-9])

    async def more() -> bool:
        if path.stat().st_size == whole + len(second):
            return False
        os.truncate(path, whole)
        with path.open("ab") as file:
            file.write(second)
        return True

    with path.open("rb") as file:
        events = [event async for event in follow_file(file, -1, more)]
    assert events == [b"event: a\ndata: 0\n\n", b"event: a\ndata: 1\n\n"]
