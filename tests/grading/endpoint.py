"""A scripted OpenAI-compatible endpoint on a free port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], str | tuple[int, bytes]]


@contextmanager
def endpoint(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve ``/v1/chat/completions``.

    Args:
        reply: Request body to the answer's text, or to a status and raw bytes.

    Yields:
        Base address and the request bodies so far; each also holds ``"authorization"``.
    """
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body | {"authorization": self.headers.get("Authorization"), "path": self.path})
            answer = reply(body)
            status, data = (200, _completion(answer)) if isinstance(answer, str) else answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _completion(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 7}}).encode()
