"""The frontend's side of the process of the backend that decodes images and sounds and computes inputs of encoders."""

import asyncio
import logging
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.media import (
    MAX_FILES,
    MediaFailed,
    MediaFile,
    MediaJob,
    MediaModel,
    MediaOutcome,
    MediaRefused,
    ProcessedMedia,
    ProcessorSettings,
    named,
)
from services.frontend.errors import APIError, invalid
from services.helper_process import HelperProcess

log = logging.getLogger("runahead.frontend")

MODULE = "services.worker.backends.vllm.media_processor"
"""The process of the only backend that reads files; it is never imported here."""
START_SECONDS = 180.0
"""Time limit for a process to import the backend and to read the checkpoint."""
JOB_SECONDS = 30.0
"""Time limit for the files of one request."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of all files that are being processed, or wait for that, as data URLs. Beside others, more are refused."""
_OUTCOMES: Decoder[MediaOutcome] = Decoder(MediaOutcome)


def _is_data(file: MediaFile) -> bool:
    head, separator, _ = file.url[:256].partition(",")
    return head.startswith(f"data:{file.kind}/") and head.endswith(";base64") and bool(separator)


class MediaProcessing:
    """Processes the files of one request at a time, in a process that is started when the first ones come, and again
    after it has died. It belongs to one event loop. `domains` and `max_bytes`: as of `MediaFetcher`."""

    def __init__(self, directory: Path, domains: Sequence[str] = (), max_bytes: int = 0) -> None:
        self._directory = str(directory)
        self._fetcher = None
        if domains:
            from services.frontend.media_fetcher import MediaFetcher  # its client for HTTP is slow to import

            self._fetcher = MediaFetcher(domains, max_bytes)
        self._thread = ThreadPoolExecutor(1, "media")
        self._process: HelperProcess | None = None
        self._settings: ProcessorSettings | None = None
        """Settings of the process."""
        self._waiting = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def close(self) -> None:
        """End the process, also during a job, and drop the jobs that wait: this one's exit waits for the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if (process := self._process) is not None:
            process.kill()

    def check(self, files: Sequence[MediaFile]) -> None:
        """Raises: APIError, for files that are neither data URLs nor at allowed addresses, and for too many"""
        for kind, count in Counter(file.kind for file in files).items():
            if count > MAX_FILES:
                raise invalid(f"a prompt has at most {MAX_FILES} parts of {kind}, but this one has {count}", "messages")
        for name, file in named(files).items():
            if _is_data(file):
                continue
            if self._fetcher is None:
                raise invalid(
                    f"{file.kind}_url: {name} is no data URL (data:{file.kind}/...;base64,...); addresses are served "
                    "only by a server that was started with --allowed-media-domains",
                    "messages",
                )
            self._fetcher.checked(file.url, name)

    async def process(self, model: MediaModel, token_ids: list[int], files: Sequence[MediaFile]) -> ProcessedMedia:
        """Return the prompt with the positions of its files, which `check` accepts.

        Raises: APIError
        """
        by_name = named(files)
        if self._fetcher is not None and (
            addresses := {name: file.url for name, file in by_name.items() if not _is_data(file)}
        ):
            for name, data in (await self._fetcher.fetch(addresses)).items():
                kind = by_name[name].kind
                by_name[name] = MediaFile(kind, f"data:{kind}/;base64,{b64encode(data).decode()}")
        size = sum(len(file.url) for file in by_name.values())
        if self._waiting and self._waiting + size > MAX_WAITING_BYTES:
            raise APIError(429, f"{MAX_WAITING_BYTES} bytes of files are being processed; try again later")
        settings = ProcessorSettings(self._directory, model)
        job = MediaJob(pack(token_ids), list(by_name.values()))
        self._waiting += size
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, settings, job)
        except ValueError:
            raise invalid("the files are too large", "messages") from None
        finally:
            self._waiting -= size
        match outcome:
            case ProcessedMedia():
                return outcome
            case MediaRefused(reason):
                raise invalid(reason, "messages")
        log.warning("files of a prompt could not be processed: %s", outcome.reason)
        raise APIError(500, "the files of the prompt could not be processed; the log of the server has the reason")

    def _run(self, settings: ProcessorSettings, job: MediaJob) -> MediaOutcome:
        """Raises: ValueError, if the job is too large"""
        message = encode(job)
        if self._process is not None and (self._settings != settings or not self._process.is_alive):
            self._process = self._process.close()
        if self._process is None:
            self._process, self._settings = HelperProcess(MODULE), settings
            try:
                started = _OUTCOMES.decode(self._process.exchange(encode(settings), START_SECONDS))
            except (EOFError, OSError):
                started = MediaFailed(f"their process did not start; is vLLM installed beside {sys.executable}?")
            if not isinstance(started, ProcessedMedia):
                self._process = self._process.close()
                return started
        try:
            return _OUTCOMES.decode(self._process.exchange(message, JOB_SECONDS))
        except (EOFError, OSError, ProtocolError):
            self._process = self._process.close()
            return MediaRefused(f"processing the files takes too much memory, or more than {JOB_SECONDS:g} s")
