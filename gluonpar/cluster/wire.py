"""Short messages, dicts, between two processes over TCP, and where a process can be reached."""

from __future__ import annotations

import array
import fcntl
import json
import socket
import struct
from typing import Any

_SIOCGIFCONF, _IFREQ_BYTES = 0x8912, 40  # <linux/sockios.h>, and struct ifreq on 64 bits


class Line:
    """One end of a TCP connection on which dicts go both ways, a line of JSON each; never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rank = connection, -1
        self._received = b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For ``select``."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send it if that can be: whoever does not read any more will be missed otherwise."""
        try:
            self.socket.send(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> list[dict] | None:
        """Messages that have come; None if the other end is closed."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def listen(backlog: int) -> socket.socket:
    """A socket that listens at all of this machine's addresses, on a port that is free."""
    return socket.create_server(("", 0), backlog=backlog)


def call(addresses: list[str], port: int, hello: dict, seconds: float = 3) -> Line:
    """A line to whoever answers ``hello`` with a welcome at one of ``addresses``.

    Raises ConnectionError, listing what was tried, if nobody does within ``seconds`` each.
    """
    tried = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=seconds)
            connection.sendall(json.dumps(hello).encode() + b"\n")
            if b"welcome" in connection.recv(64):
                return Line(connection)
            tried.append(f"{address} (no welcome)")
        except OSError as error:
            tried.append(f"{address} ({error})")
    raise ConnectionError(
        f"rank {hello['rank']} cannot reach rank 0 on TCP port {port} at {', '.join(tried)}; let "
        "the machines' firewalls pass connections between them"
    )


def addresses() -> list[str]:
    """IPv4 addresses of this machine's interfaces, the loopback's last."""
    space = array.array("B", bytes(64 * _IFREQ_BYTES))
    request = struct.pack("iL", len(space), space.buffer_info()[0])  # struct ifconf
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some_socket:
        used = struct.unpack("iL", fcntl.ioctl(some_socket, _SIOCGIFCONF, request))[0]
    entries = [space[i : i + _IFREQ_BYTES].tobytes() for i in range(0, used, _IFREQ_BYTES)]
    found = [socket.inet_ntoa(entry[20:24]) for entry in entries]
    return sorted(found, key=lambda address: address.startswith("127."))
