"""Metrics by HTTP, from a thread of the process that has the buffers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from engram.metrics.collector import Collector, checked_buffers
from engram.remote.addresses import Address, address_of

if TYPE_CHECKING:
    from engram.metrics.catalog import HasStats

PATH = "/metrics"
#: Requests answered at a time; others are closed at once.
_MOST = 8
#: Between two looks whether it is to end.
_LOOK_S = 0.1
#: Of one request, from the first byte to the last.
_LIMIT_S = 10.0


class MetricsServer:
    """Answers ``GET /metrics``, until it is closed or the process ends. :func:`serve` makes it; ``with`` closes it."""

    def __init__(self, buffers: Mapping[str, HasStats], at: Address) -> None:
        registry = CollectorRegistry()
        registry.register(Collector(buffers))
        try:
            self._http = _Http(at, registry)
        except OSError as error:
            raise OSError(error.errno, error.strerror, at.place) from error
        self._at = at._replace(port=self._http.server_port)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_LOOK_S,), name="engram-metrics", daemon=True
        )
        self._thread.start()
        self._closed = False

    @property
    def address(self) -> str:
        """``"http://HOST:PORT/metrics"``."""
        return f"http://{self._at.place}{PATH}"

    def close(self) -> None:
        """End it. Repeatable."""
        if not self._closed:
            self._closed = True
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(
    buffers: HasStats | Mapping[str, HasStats], address: str = "127.0.0.1:9469", *, insecure: bool = False
) -> MetricsServer:
    """Answer ``GET /metrics`` with the numbers of buffers, for Prometheus and the like: see docs/metrics.md.

    Args:
        buffers: a buffer, which is called ``"replay"`` there; or several by name. Of any kind: connected, following or
            read-only ones, too.
        address: ``"HOST:PORT"``; port 0 is any that is free. A host that only this machine reaches, unless ``insecure``.
        insecure: listen where other machines can come, too. All of them may read the numbers, and nothing else.

    Returns:
        The server, which runs in a thread. Its ``address`` is the URL; ``close()`` or the end of ``with`` ends it. A forked child has
        none.

    At most 8 requests are answered at a time, each for 10 seconds at most; others are turned away. Nothing can be changed by them.

    Raises:
        TypeError, ValueError: other buffers, or no such address; one that other machines reach, without ``insecure``.
        OSError: the address is taken.
        ModuleNotFoundError: ``engram-replay[metrics]`` is not installed.

    Cost: as :class:`Collector`, for each request.

    >>> import torch, urllib.request
    >>> import engram.metrics
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> _ = rb.extend(torch.arange(3))
    >>> with engram.metrics.serve(rb, "127.0.0.1:0") as server:
    ...     text = urllib.request.urlopen(server.address).read().decode()
    >>> [line for line in text.splitlines() if line.startswith("engram_rows")]
    ['engram_rows{buffer="replay"} 3.0']
    """
    at = metrics_address(address, insecure=insecure)
    given = buffers if isinstance(buffers, Mapping) else {"replay": buffers}
    return MetricsServer(checked_buffers(given, "metrics"), at)


def metrics_address(address: object, *, insecure: bool) -> Address:
    """Where to listen. Raises as :func:`serve`."""
    at = address_of(address, "metrics")
    if at.scheme != "grpc" or "://" in str(address):
        raise ValueError(f"metrics: address: expected HOST:PORT, got {address!r}.")
    if not at.is_loopback and not insecure:
        raise ValueError(
            f"metrics: address: expected one that only this machine reaches, such as 127.0.0.1:{at.port}, got {address!r}. Pass "
            "insecure=True (--insecure) in a network that you trust."
        )
    return at


class _Http(ThreadingHTTPServer):
    """A thread a request, of which there are few, and none for long."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST

    def __init__(self, at: Address, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._free = threading.BoundedSemaphore(_MOST)
        if ":" in at.host:
            self.address_family = socket.AF_INET6
        super().__init__((at.host, at.port), _Request)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for the name of the host
        self.server_port = self.server_address[1]

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        assert isinstance(request, socket.socket)
        limit = threading.Timer(_LIMIT_S, _cut, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves early is none of ours."""


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """One request, and its connection ends."""

    server: _Http
    timeout = _LIMIT_S
    server_version = "engram"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, "expected /metrics")
            return
        encode, kind = choose_encoder(self.headers.get("Accept") or "")
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its name there
        """Nothing is logged."""
