"""Echo's side of ``bench_single``: a program for an environment of its own, which has id-echo and NumPy.

``python -m benchmarks.echo_peer server`` takes batches of 256 rows and forgets them: Echo's server is its consumer. ``write PORT`` sends
one row after the other, and waits for its acknowledgements at the end of a window.
"""

import sys
import threading
from functools import partial
from importlib.metadata import version

import echo

from benchmarks.rows_of_actors import row
from benchmarks.workers import answer_lines

BATCH = 256


def main(role: str, port: str = "0") -> None:
    if role == "server":
        server = echo.Server(row(), batch_size=BATCH, transport=echo.TcpTransport(port=0))
        server.start()
        threading.Thread(target=_consume, args=(server,), daemon=True).start()
        answer_lines(lambda: None, None, {"port": server.port, "echo": version("id-echo")})
    else:
        client = echo.TcpClient("127.0.0.1", int(port), row())
        answer_lines(partial(client.send, row()), client.wait, {})
        client.close()


def _consume(server: echo.Server) -> None:
    while server.sample() is not None:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
