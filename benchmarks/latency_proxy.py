"""A proxy on loopback that hands on every request late: `latency_proxy PORT SERVER_PORT SECONDS`.

Answers pass through a pipe in the kernel (splice), so that the proxy is not what limits a transfer.
A request of several packets is late several times; those of object stores fit one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress

REQUEST_BYTES = 64 << 10
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031


def hand_on_requests(client: socket.socket, server: socket.socket, seconds: float) -> None:
    with suppress(OSError):
        while data := client.recv(REQUEST_BYTES):
            time.sleep(seconds)
            server.sendall(data)
    with suppress(OSError):
        server.shutdown(socket.SHUT_WR)


def hand_on_answers(server: socket.socket, client: socket.socket) -> None:
    import fcntl

    out, into = os.pipe()
    fcntl.fcntl(into, F_SETPIPE_SZ, PIPE_BYTES)
    with suppress(OSError):
        while count := os.splice(server.fileno(), into, PIPE_BYTES):
            while count:
                count -= os.splice(out, client.fileno(), count)
    os.close(out)
    os.close(into)
    for one in (client, server):  # closed when the other thread ends, too
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def main() -> None:
    port, server_port, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with socket.create_server(("127.0.0.1", port), backlog=256) as listening:
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", server_port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for target, arguments in (
                (hand_on_requests, (client, server, seconds)),
                (hand_on_answers, (server, client)),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
