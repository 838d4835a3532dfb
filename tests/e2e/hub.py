"""A local server of the Hugging Face hub's protocol: what `huggingface_hub` requests to list and download files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_server import http_server

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


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, with_body: bool) -> None:
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
                    if with_body:
                        self.hub.downloads.append(f"{name}/{file}")
                    return self._send(data, with_body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _send(self, data: bytes, with_body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def local_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[LocalHub]:
    """Serve the repositories on a thread."""
    hub = LocalHub(repositories)
    with http_server(type("_HubHandler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
