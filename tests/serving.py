"""Servers in a thread of the test."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from typing import Any


@contextmanager
def serving(server: BaseServer) -> Iterator[None]:
    """Serve in a thread as long as the block lasts."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class JSONHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and logs nothing."""

    def read_json(self) -> Any:
        """The body of the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, content: Any, status: int = 200) -> None:
        """Reply with JSON, or with a text as it is."""
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        with suppress(BrokenPipeError):  # the client had no time to wait
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass
