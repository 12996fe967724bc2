"""The page served live, with /metrics for Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bevctl.errors import BevctlError, ExitCode
from bevctl.monitor.html import page
from bevctl.monitor.report import Report

REFRESH_S = 10
FRESH_S = 2.0
"""A look is shared by requests that come this soon after it."""
Look = Callable[[], Sequence[Report]]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `:PORT` or `PORT`; the host is this machine alone where none is given."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BevctlError(f"--serve {text!r} is no address.", "Give HOST:PORT, for example 127.0.0.1:8080.")
    return host.strip("[]") or "127.0.0.1", int(port)


class MonitorServer(ThreadingHTTPServer):
    """Answers / with the page and /metrics with figures, from a look at the logs that is at most 2 s old."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], look: Look) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._seen: tuple[float, Sequence[Report]] | None = None
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            host, port = address
            raise BevctlError(
                f"Cannot serve on {host}:{port}: {error.strerror or error}.",
                "Choose another port.",
                ExitCode.RUN_FAILED,
            ) from None

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    def reports(self) -> Sequence[Report]:
        """What the logs say now."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
                self._seen = time.monotonic(), self._look()
            return self._seen[1]


class _Handler(BaseHTTPRequestHandler):
    server: MonitorServer
    server_version = "bevctl"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers: dict[str, Callable[[Sequence[Report]], tuple[str, str]]] = {"/": _page, "/metrics": _metrics}
        if path not in answers:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "Nothing here; / is the page, /metrics for Prometheus.\n")
            return
        try:
            kind, body = answers[path](self.server.reports())
        except BevctlError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error.message} {error.hint}\n")
            return
        self._answer(HTTPStatus.OK, kind, body)

    def _answer(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""


def _page(reports: Sequence[Report]) -> tuple[str, str]:
    return "text/html", page(reports, REFRESH_S)


def _metrics(reports: Sequence[Report]) -> tuple[str, str]:
    from bevctl.monitor.prometheus import CONTENT_TYPE, exposition

    return CONTENT_TYPE, exposition(reports)
