"""The frontend's side of the process of the backend that decodes images and computes the encoder's inputs."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.media import (
    MAX_IMAGES,
    ImageJob,
    ImagesFailed,
    ImagesOutcome,
    ImagesRefused,
    MediaModel,
    ProcessedImages,
    ProcessorSettings,
)
from services.frontend.errors import APIError, invalid

if TYPE_CHECKING:
    from services.frontend.image_fetcher import ImageFetcher

log = logging.getLogger("runahead.frontend")

MODULE = "services.worker.backends.vllm.image_processor"
"""The process of the only backend that reads images; it is never imported here."""
START_SECONDS = 180.0
"""Time limit for a process to import the backend and to read the checkpoint."""
JOB_SECONDS = 30.0
"""Time limit for the images of one request."""
MAX_WAITING = 32
"""Requests whose images are being processed, or wait for that. One more is refused."""
DATA_URL = "data:image/"
_OUTCOMES: Decoder[ImagesOutcome] = Decoder(ImagesOutcome)


class _ImageProcess:
    """One process. It ends with this object. All methods raise EOFError or OSError if the process has ended."""

    def __init__(self, settings: ProcessorSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self.settings = settings
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self) -> ImagesOutcome:
        return self.exchange(encode(self.settings), START_SECONDS)

    def exchange(self, message: bytes, seconds: float) -> ImagesOutcome:
        """Send a message and wait for the answer. A process that takes longer is killed."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            self._connection.send_bytes(message)
            return _OUTCOMES.decode(self._connection.recv_bytes())
        finally:
            timer.cancel()


def _fetcher(domains: Sequence[str], max_bytes: int) -> "ImageFetcher":
    from services.frontend.image_fetcher import ImageFetcher  # its client for HTTP is slow to import

    return ImageFetcher(domains, max_bytes)


def _is_data(url: str) -> bool:
    head, separator, _ = url[:256].partition(",")
    return head.startswith(DATA_URL) and head.endswith(";base64") and bool(separator)


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


class ImageProcessing:
    """Processes the images of one request at a time, in a process that is started when the first ones come, and again
    after it has died. It belongs to one event loop.

    Args:
        directory: of the checkpoint
        domains: host names from which images are fetched
        max_bytes: of all files that are fetched for one request
    """

    def __init__(self, directory: Path, domains: Sequence[str] = (), max_bytes: int = 0) -> None:
        self._directory = str(directory)
        self._fetcher = _fetcher(domains, max_bytes) if domains else None
        self._thread = ThreadPoolExecutor(1, "images")
        self._process: _ImageProcess | None = None
        self._waiting = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def check(self, urls: Sequence[str]) -> None:
        """Raises: APIError, for images that are neither data URLs nor at allowed addresses, and for too many"""
        if len(urls) > MAX_IMAGES:
            raise invalid(
                f"a prompt has at most {MAX_IMAGES} images, but this one has {len(urls)}", "messages"
            )
        for number, url in enumerate(urls):
            if _is_data(url):
                continue
            if self._fetcher is None:
                raise invalid(
                    f"image_url: image {number} is no data URL ({DATA_URL}png;base64,...); addresses are served only "
                    "by a server that was started with --allowed-media-domains",
                    "messages",
                )
            self._fetcher.checked(url, number)

    async def process(self, model: MediaModel, token_ids: list[int], images: list[str]) -> ProcessedImages:
        """Return the prompt with the positions of its images.

        Args:
            images: data URLs and addresses, which `check` accepts

        Raises: APIError
        """
        images = [*images]
        if self._fetcher is not None and (
            addresses := {number: url for number, url in enumerate(images) if not _is_data(url)}
        ):
            for number, file in (await self._fetcher.fetch(addresses)).items():
                images[number] = f"{DATA_URL};base64,{b64encode(file).decode()}"
        if self._waiting >= MAX_WAITING:
            raise APIError(429, f"the images of {MAX_WAITING} requests are being processed; try again later")
        settings = ProcessorSettings(self._directory, model.dtype)
        job = ImageJob(pack(token_ids), images)
        self._waiting += 1
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, settings, job)
        except ValueError:
            raise invalid("the images are too large", "messages") from None
        finally:
            self._waiting -= 1
        match outcome:
            case ProcessedImages():
                return outcome
            case ImagesRefused(reason):
                raise invalid(reason, "messages")
        log.warning("images could not be processed: %s", outcome.reason)
        raise APIError(500, "the images could not be processed; the log of the server has the reason")

    def _run(self, settings: ProcessorSettings, job: ImageJob) -> ImagesOutcome:
        """Raises: ValueError, if the job is too large"""
        message = encode(job)
        if self._process is not None and (self._process.settings != settings or not self.is_alive):
            self._process = self._process.close()
        if self._process is None:
            process = _ImageProcess(settings)
            try:
                started = process.start()
            except (EOFError, OSError):
                started = ImagesFailed(
                    f"their process did not start; is vLLM installed beside {sys.executable}?"
                )
            if not isinstance(started, ProcessedImages):
                process.close()
                return started
            self._process = process
        try:
            return self._process.exchange(message, JOB_SECONDS)
        except (EOFError, OSError, ProtocolError):
            self._process = self._process.close()
            return ImagesRefused(
                f"processing the images takes too much memory, or more than {JOB_SECONDS:g} s"
            )
