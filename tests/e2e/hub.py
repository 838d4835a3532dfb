"""A local server of the Hugging Face hub's protocol: what `huggingface_hub` requests to list and download files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.http_server import Handler, http_server

COMMIT = "0123456789012345678901234567890123456789"


class LocalHub:
    """Repositories by name, each with its files by path. One commit, on the branch `main`."""

    url = ""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.downloads: list[str] = []
        """Files that were sent, as repository/path."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Return environment variables of a process that uses this hub and nothing else."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"), "HF_TOKEN": ""}


class _Handler(Handler):
    hub: LocalHub

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        for name, files in self.hub.repositories.items():
            if path == f"/api/models/{name}/revision/main":
                siblings = [{"rfilename": file} for file in files]
                return self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            if path in (f"/api/models/{name}/tree/{revision}" for revision in ("main", COMMIT)):
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                    for file, data in files.items()
                ]
                return self._send(json.dumps(entries).encode())
            for file, data in files.items():
                if path == f"/{name}/resolve/{COMMIT}/{file}":
                    if self.command == "GET":
                        self.hub.downloads.append(f"{name}/{file}")
                    return self._send(data)
        return self.reply(404, x_error_code="RepoNotFound")

    def _send(self, data: bytes) -> None:
        self.reply(200, data, etag=f'"{_etag(data)}"', x_repo_commit=COMMIT)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def local_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[LocalHub]:
    """Serve the repositories on a thread."""
    hub = LocalHub(repositories)
    with http_server(type("_HubHandler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
