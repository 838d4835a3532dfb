"""Static files of the page at `/`: a chat and a live view of the engine. They have no data; data needs an API key."""

from importlib import resources

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


def load_page() -> dict[str, Response]:
    """Read every file of the package into memory. Return them by their paths, which need no API key."""
    found = {}
    root = resources.files("services.frontend.page") / "static"
    for folder in ("", "vendor/"):
        for file in (root / folder).iterdir():
            media_type = TYPES.get(file.name.rpartition(".")[2])
            if media_type is not None and file.is_file():
                path = "/" if file.name == INDEX else f"{PREFIX}{folder}{file.name}"
                found[path] = Response(file.read_bytes(), headers=HEADERS, media_type=media_type)
    return found
