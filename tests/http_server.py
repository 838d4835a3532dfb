"""A small HTTP server on a thread."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Prints nothing. Requests of all methods are answered by `answer`."""

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_GET  # noqa: N815  the names that http.server calls

    def answer(self) -> None:
        raise NotImplementedError

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Answer with a whole body. `headers`: with underscores for hyphens."""
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(handler: type[Handler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a free port of this machine. Yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
