"""Responses in a directory, which frontends may share: a file for each, and a folder for each API key.

Its rules are in docs/invariants.md: stored before sent, and one writer.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.config import FrontendConfig
from services.frontend.errors import APIError, invalid
from services.frontend.responses_api import response_file
from services.frontend.responses_api.answers import failed_event, joined
from services.frontend.responses_api.background import OthersRun, OwnRun, Run
from services.frontend.responses_api.responses import ResponseObject
from services.frontend.responses_api.schemas import Item
from services.private import make_shared, private_directory

log = logging.getLogger("runahead.frontend")

MAX_BYTES = 1 << 30
"""Disk space of all responses. Those of the API key that takes the most make room, the oldest first."""
PRIVATE_BYTES = 64 << 20
"""The same for a private directory, which is memory."""
MAX_FILES = 10_000
MAX_SECONDS = 3600.0
"""Time without a change after which a response is deleted; one that is still generated then fails."""
PRUNE_INTERVAL = 10.0
"""Maximum time between two checks of these bounds, seconds."""
GROWTH_PER_CHECK = 1 / 16
"""Share of the space after whose growth the bounds are checked at once."""
BLOCK = 4096
"""Disk space of the smallest file, bytes."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  only a directory inside it is used, which is private
PREFIX = "runahead-responses-"
_ID = re.compile(r"resp_[0-9a-f]{32}")
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(rf"{_ID.pattern}\.(jsonl|cancel)")
_NOT_CONTINUED = ("queued", "in_progress", "failed", "cancelled")
"""Statuses of responses without a whole answer."""


@dataclass(frozen=True)
class Orphan:
    """A response whose frontend is lost. This one has the lock on its file now."""

    id: str
    origin: response_file.Origin
    run: OwnRun
    content: response_file.FileContent

    def fail(self, error: APIError) -> None:
        """End the response, which cannot go on."""
        events = self.content.events
        self.run.write(*failed_event(joined(events), error, len(events)))


GoOn = Callable[[Orphan], None]
"""Starts the run of a response from its orphan, or ends it. Raises: APIError, if neither can be done now"""
Stored = response_file.FileContent | Run
"""A stored response, which clients may continue by `previous_response_id`. One that was created with `background` is a
run, which may grow."""


def conversation_of(stored: Stored) -> list[Item]:
    """Return the conversation up to and with the answer. Raises: APIError, if the answer is not whole"""
    response = msgspec.json.decode(stored.response)
    if response.get("status") in _NOT_CONTINUED:
        raise invalid(
            f"the response is {response['status']}; only one that is completed or incomplete can be continued",
            "previous_response_id",
        )
    return stored.head.items() + response_file.ITEM_LIST.validate_python(response["output"])


def run_of(stored: Stored, param: str | None = None) -> Run:
    """Return the run of a response with `background`. Raises: APIError, if it is another one"""
    if isinstance(stored, response_file.FileContent):
        raise invalid(
            "this response was not created with background; its events were not kept, and it cannot be cancelled", param
        )
    return stored


def not_stored(id: str, param: str | None) -> APIError:
    return APIError(
        404,
        f"response {id!r:.80} is not stored here: it is unknown, deleted, expired, or was made by another frontend",
        param,
        "previous_response_not_found" if param else "response_not_found",
        logged="this response is not stored here",
    )


@contextlib.contextmanager
def response_files(config: FrontendConfig) -> Iterator["ResponseFiles | None"]:
    """Make the store of responses: in the directory of the configuration or, without one, in a private one in memory.

    Raises: OSError, if the directory cannot be used
    """
    if config.response_store_dir is not None:
        yield ResponseFiles(Path(os.path.expanduser(config.response_store_dir)))
    elif config.response_store:
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        with private_directory(base, PREFIX) as directory:
            yield ResponseFiles(directory, min(PRIVATE_BYTES, shutil.disk_usage(base).total // 2))
    else:
        yield None


class ResponseFiles:
    """The responses of all frontends that use a directory.

    Raises: OSError, if the directory cannot be used
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._directory, self._max_bytes, self._max_files = directory, max_bytes, max_files
        self._runs: dict[Path, OwnRun] = {}
        """Runs of this frontend that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._growth = 0
        """Bytes that this frontend wrote since the bounds were checked."""
        self._has_grown = asyncio.Event()
        make_shared(directory)

    def _path(self, tenant: str, id: str) -> Path:
        folder = hashlib.sha256(b"responses of " + tenant.encode()).hexdigest()[:32]
        return self._directory / folder / f"{id}.jsonl"

    def add(self, tenant: str, head: response_file.StoredHead, response: ResponseObject) -> None:
        """Store a response without `background`, unless it is larger than the store. A failure to write is logged."""
        data = msgspec.json.encode(response)
        if len(bytes(head.conversation)) + len(data) > self._max_bytes:
            return
        with contextlib.suppress(APIError):
            OwnRun(self._path(tenant, response["id"]), head, self._grow).write(b"", data)
        self._grow(BLOCK)  # the last block is not full

    def new_run(self, tenant: str, id: str, head: response_file.StoredHead) -> OwnRun:
        """Return a response with `background`, which can be started.

        Raises: APIError, if the request is larger than the store
        """
        if len(bytes(head.conversation)) > self._max_bytes:
            raise APIError(413, f"the request is larger than the store of responses ({self._max_bytes} bytes)")
        return OwnRun(self._path(tenant, id), head, self._grow)

    def _grow(self, num_bytes: int) -> None:
        self._growth += num_bytes
        if self._growth > self._max_bytes * GROWTH_PER_CHECK:
            self._has_grown.set()

    def begin(self, run: OwnRun, finishing: Coroutine[Any, Any, None]) -> None:
        """Keep a run that has started, and the work that finishes it, until both end."""
        run.has_begun = True
        self._runs[run.path] = run
        self._keep(run.watch()).add_done_callback(lambda _: self._runs.pop(run.path, None))
        self._keep(finishing)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def get(self, tenant: str, id: str, param: str | None = None, go_on: GoOn | None = None) -> Stored:
        """Return a response of any frontend.

        Args:
            go_on: called if its frontend is lost.

        Raises: APIError, if this key has no such response, or it is damaged, or `go_on` cannot start it
        """
        path = self._path(tenant, id)

        def take_up() -> bool:
            return path not in self._runs and go_on is not None and self._take_up(path, id, param, go_on)

        if (own := self._runs.get(path)) is not None and path.exists():
            return own
        content = response_file.FileContent(self._read(path, id, param))
        if content.head.origin is None:
            return content
        if not content.last:
            take_up()
        return self._runs.get(path) or OthersRun(path, content, take_up)

    def _read(self, path: Path, id: str, param: str | None) -> bytes:
        """Raises: APIError"""
        try:
            data = path.read_bytes() if _ID.fullmatch(id) else b""
        except FileNotFoundError:
            data = b""
        except OSError as error:
            log.error("a stored response cannot be read: %s", error)
            raise APIError(500, f"the stored response cannot be read: {error.strerror}", param) from None
        if data.count(b"\n") < 2:  # nobody has got its id
            raise not_stored(id, param)
        return data

    def _take_up(self, path: Path, id: str, param: str | None, go_on: GoOn) -> bool:
        """Raises: APIError"""
        with contextlib.ExitStack() as stack:
            try:
                lock = os.open(path, os.O_RDWR | os.O_APPEND)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                content = response_file.FileContent(self._read(path, id, param))
                origin = content.head.origin
                if content.last or origin is None or not os.fstat(lock).st_nlink:
                    return False
                os.ftruncate(lock, content.size)
            except BlockingIOError:  # it lives
                return False
            except FileNotFoundError:
                raise not_stored(id, param) from None
            except OSError as error:
                raise response_file.not_written(path, error) from None
            stack.pop_all()
        go_on(Orphan(id, origin, OwnRun(path, content.head, self._grow, lock), content))
        log.warning("a response of a lost frontend was taken up: id=%s", id)
        return True

    def delete(self, tenant: str, id: str) -> None:
        """Raises: APIError, if this key has no such response"""
        path = self._path(tenant, id)
        self._read(path, id, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise response_file.not_written(path, error) from None
        if (run := self._runs.get(path)) is not None:
            run.fail(APIError(500, "the response was deleted"))

    async def keep_bounds(self) -> None:
        """Delete what is too old or too much, again and again."""
        while True:
            self._growth = 0
            self._has_grown.clear()
            try:
                await asyncio.to_thread(self.prune)
            except OSError as error:
                log.error("old responses cannot be deleted: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_grown.wait(), PRUNE_INTERVAL)

    def prune(self) -> None:
        """Delete what is too old or too much. A response that is generated then fails.

        Raises: OSError
        """
        shares: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
        for folder in _entries(self._directory, _FOLDER):
            for entry in _entries(folder, _FILE):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(entry)
                    shares[folder].append((found.st_mtime, max(found.st_blocks * 512, found.st_size), entry))
        sizes = {folder: sum(size for _, size, _ in files) for folder, files in shares.items()}
        for files in shares.values():
            files.sort(reverse=True)
        oldest = time.time() - MAX_SECONDS
        while shares:
            too_many = sum(map(len, shares.values())) > self._max_files
            too_large = sum(sizes.values()) > self._max_bytes
            if too_many or too_large:
                folder = max(shares, key=lambda name: len(shares[name]) if too_many else sizes[name])
            else:
                folder = min(shares, key=lambda name: shares[name][-1][0])
                if shares[folder][-1][0] > oldest:
                    return
            _, size, entry = shares[folder].pop()
            sizes[folder] -= size
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry)
            if not shares[folder]:
                del shares[folder], sizes[folder]


def _entries(folder: str | Path, names: re.Pattern[str]) -> list[str]:
    """Return the paths of the entries with these names; the directory may have others, which are not the store's."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if names.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
