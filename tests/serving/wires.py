"""Computers of their own for a server and its clients, and a wire between them that delays, loses, cuts and resets.

Each program has a network namespace, and in it a TUN device whose packets come to the test: the wire is a thread there. It takes Linux,
``/dev/net/tun``, and the right to make namespaces; no other tools, and no part of the kernel that many lack, as ``netem``.
"""

import contextlib
import heapq
import itertools
import os
import select
import socket
import struct
import threading
import time

import pytest

from tests import fresh

#: What a program begins with: it leaves for a network of its own, and hands the end of its cable to the test. 1 is the server's address.
PLUG = """
import ctypes, fcntl, os, socket, struct, sys

def plug(number, place):
    if ctypes.CDLL(None, use_errno=True).unshare(0x4000_0000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "network namespaces are not allowed here")
    cable = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(cable, 0x4004_54CA, struct.pack("16sH22x", b"cable", 0x1001))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        def tell(request, name, said):
            fcntl.ioctl(asked, request, struct.pack("16s24s", name, said))
        def address(*parts):
            return struct.pack("=HH4B", socket.AF_INET, 0, *parts)
        tell(0x8914, b"lo", struct.pack("=H", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
        tell(0x8916, b"cable", address(10, 78, 0, number))  # SIOCSIFADDR
        tell(0x891C, b"cable", address(255, 255, 255, 0))  # SIOCSIFNETMASK
        tell(0x8914, b"cable", struct.pack("=H", 0x41))
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(place)
        socket.send_fds(test, [b"%d" % number], [cable])
        test.recv(1)
    os.close(cable)

try:
    plug(number, place)
except OSError as error:
    print("no:", error, flush=True)
    os._exit(0)
"""
_SERVER, _RESET = 1, 4


class Wire:
    """Between a server and its clients. Its attributes may be changed at any time."""

    def __init__(self, folder, chance):
        self._place, self._chance = f"{folder}/wire", chance
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._place)
        self._listener.listen()
        #: Seconds that each packet takes, and how many of them get lost.
        self.delay_s, self.loss = 0.0, 0.0
        #: Whether nothing comes through.
        self.is_cut = False
        #: Bytes that come through from now on until a connection is reset; None: it is not.
        self.reset_after = None
        #: Connections that were reset; packets that were lost, and those of them that ask for a new connection.
        self.resets = self.lost = self.lost_requests = 0
        self._ends, self._unplugged = {}, []
        self._lock = threading.Lock()
        self._under_way, self._number = [], itertools.count()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, number, code, **values):
        """A program on a computer of its own, with the address ``10.78.0.NUMBER``. Skips the test where that is not possible."""
        program = fresh.start(PLUG + code, number=number, place=self._place, **values)
        self._listener.settimeout(0.05)
        for _ in range(1200):
            try:
                connected, _ = self._listener.accept()
                break
            except TimeoutError:
                if program.poll() is not None:
                    assert program.out.startswith("no: "), program.err
                    pytest.skip(program.out.removeprefix("no: ").strip())
        else:
            raise AssertionError("no program has come")
        with connected:
            said, (end, *_), *_ = socket.recv_fds(connected, 10, 1)
            with self._lock:
                self._ends[int(said)] = end
            os.write(self._woken, b"+")
            connected.send(b"+")
        return program

    def unplug(self, number):
        """For good: of its computer nothing more is heard, and its connections stay half open."""
        with self._lock:
            self._unplugged.append(self._ends.pop(number))
        os.write(self._woken, b"+")

    def close(self):
        os.close(self._woken)
        self._thread.join()
        for end in (*self._ends.values(), *self._unplugged):
            os.close(end)
        os.close(self._wake)
        self._listener.close()

    # ---- the thread ----------------------------------------------------------------------------------------------------

    def _run(self):
        while True:
            with self._lock:
                ends, unplugged, self._unplugged = dict(self._ends), self._unplugged, []
            for end in unplugged:
                os.close(end)
            until = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready, _, _ = select.select([self._wake, *ends.values()], [], [], until)
            if self._wake in ready and not os.read(self._wake, 100):
                return
            for number, end in ends.items():
                if end in ready:
                    self._take(number, os.read(end, 1 << 16))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                self._deliver(to, packet)

    def _take(self, number, packet):
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:  # the kernel looks for neighbours
            return
        if self.is_cut or self._chance.random() < self.loss:
            self.lost += 1
            self.lost_requests += packet[33] & 0x12 == 2  # SYN without ACK
            return
        if self.reset_after is not None:
            self.reset_after = max(0, self.reset_after - len(packet))
            if not self.reset_after and number != _SERVER:
                self.reset_after = None
                self._reset(number, packet)
                self.resets += 1
                return
        heapq.heappush(self._under_way, (time.monotonic() + self.delay_s, next(self._number), packet[19], packet))

    def _deliver(self, number, packet):
        with self._lock:
            end = self._ends.get(number)
        if end is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(end, packet)

    def _reset(self, number, packet):
        """In place of a packet: both sides are told that the connection is gone."""
        here, there, ports = packet[12:16], packet[16:20], packet[20:24]
        sequence, acknowledged = packet[24:28], packet[28:32]
        self._deliver(_SERVER, _segment(here, there, ports, sequence))
        self._deliver(number, _segment(there, here, ports[2:] + ports[:2], acknowledged))


def _segment(source, target, ports, sequence):
    """An IPv4 packet of a TCP segment that resets."""
    tcp = ports + sequence + bytes(4) + struct.pack("!BBHHH", 5 << 4, _RESET, 0, 0, 0)
    check = _checksum(source + target + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", check) + tcp[18:]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + source + target
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + tcp


def _checksum(raw):
    total = sum(struct.unpack(f"!{len(raw) // 2}H", raw))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return ~total & 0xFFFF
