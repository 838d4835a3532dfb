"""Static files of the page at `/`: a chat and a live view of the engine. They have no data; data needs an API key."""

from importlib import resources
from typing import NamedTuple

from fastapi import FastAPI
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

PREFIX = "/page/"
INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types by the ending of a file's name. Files with other endings are not served."""
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class _PageFile(NamedTuple):
    content: bytes
    media_type: str


class PageFiles:
    def __init__(self, files: dict[str, _PageFile]) -> None:
        self._files = files

    @classmethod
    def load(cls) -> "PageFiles":
        """Read every file of the package into memory."""
        found = {}
        root = resources.files("services.frontend.page") / "static"
        for folder in ("", "vendor/"):
            for file in (root / folder).iterdir():
                ending = file.name.rpartition(".")[2]
                if file.is_file() and ending in TYPES:
                    path = "/" if file.name == INDEX else f"{PREFIX}{folder}{file.name}"
                    found[path] = _PageFile(file.read_bytes(), TYPES[ending])
        return cls(found)

    @property
    def paths(self) -> frozenset[str]:
        """Paths that need no API key."""
        return frozenset(self._files)

    def add_to(self, app: FastAPI) -> None:
        """Add a route for each file. They are no part of the API's document."""
        for path in self._files:
            app.add_route(path, self._serve, methods=["GET"], include_in_schema=False)

    async def _serve(self, http: HTTPRequest) -> Response:
        file = self._files[http.scope["path"]]
        return Response(file.content, headers=HEADERS, media_type=file.media_type)
