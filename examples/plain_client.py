"""A client from scratch: what docs/protocol.md says, with Python's standard library alone and without shared memory.

It imports nothing of allreduced. Read it beside the document when you write a client in another language. Start an
agent with `allreduced agent --socket @a`, and two of these:

    python examples/plain_client.py @a job-1 0 2 &
    python examples/plain_client.py @a job-1 1 2
"""

import array
import os
import socket
import struct
import sys
from typing import Any

HELLO, JOIN, SUBMIT, UPLOAD, LEAVE = 1, 2, 5, 6, 8
WELCOME, REFUSED, JOINED, DONE, DOWNLOAD, REQUEST_FAILED = 65, 66, 67, 71, 72, 73
FLOAT32, SUM = 1, 1
PIECE = 1 << 20

# msgpack: the few forms that are needed. A client may write longer forms than necessary, an agent writes any.


def pack(value: object) -> bytes:
    """Encode one value."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        return struct.pack(">BQ", 0xCF, value) if value >= 0 else struct.pack(">Bq", 0xD3, value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        data = value.encode()
        return struct.pack(">BH", 0xDA, len(data)) + data
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    raise TypeError(type(value))


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value at this place, and the place behind it."""
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 256), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in _NUMBERS:
        form = _NUMBERS[code]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if 0x80 <= code < 0xA0:
        size, kind = code & 15, code & 0xF0
    elif code < 0xC0:
        size, kind = code & 31, 0xA0
    else:
        form, kind = _SIZES[code]
        (size,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
    if kind == 0xA0:
        return data[at : at + size].decode(), at + size
    if kind == 0xC4:
        return data[at : at + size], at + size
    items = []
    for _ in range(size if kind == 0x90 else 2 * size):
        item, at = unpack(data, at)
        items.append(item)
    return (items if kind == 0x90 else dict(zip(items[::2], items[1::2], strict=True))), at


_NUMBERS = {
    **{0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"},
    **{0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"},
}
_SIZES = {
    **{0xC4: (">B", 0xC4), 0xC5: (">H", 0xC4), 0xC6: (">I", 0xC4)},  # bytes
    **{0xD9: (">B", 0xA0), 0xDA: (">H", 0xA0), 0xDB: (">I", 0xA0)},  # text
    **{0xDC: (">H", 0x90), 0xDD: (">I", 0x90)},  # arrays
    **{0xDE: (">H", 0x80), 0xDF: (">I", 0x80)},  # maps
}


class Client:
    """One rank of a group of one agent."""

    def __init__(self, path: str, job: str, rank: int, size: int) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.connect("\0" + path[1:] if path.startswith("@") else path)
        self.request = 0
        self.send(HELLO, 1, 1, os.getpid(), False)
        _, _, self.node, _, self.inline_limit, *_ = self.receive(WELCOME)
        self.send(JOIN, 0, job, "world", rank, size, 0, 60.0, 0.0)
        _, _, self.group, *_ = self.receive(JOINED)

    def all_reduce(self, values: "array.array[float]", name: str) -> "array.array[float]":
        """Return the sum of the float32 values of all ranks."""
        data, shape = values.tobytes(), f"({len(values)},)"
        inside = len(data) <= self.inline_limit
        self.request += 1
        where = [data if inside and data else None, -1, 0, not inside, True]
        head = [self.request, self.group, "all_reduce", name, FLOAT32, SUM, shape, len(values)]
        self.send(SUBMIT, *head, -1, 0, 0.0, "", *where)
        if not inside:
            for start in range(0, len(data), PIECE):
                self.send(UPLOAD, self.request, data[start : start + PIECE])
        _, _, payload, _, _, _, _, pieces, *_ = self.receive(DONE)
        result, last = payload or b"", not pieces
        while not last:
            _, _, piece, last, *_ = self.receive(DOWNLOAD)
            result += piece
        return array.array("f", result)

    def close(self) -> None:
        """Leave in order: just closing the connection would be a lost rank."""
        self.send(LEAVE, self.group)
        self.connection.close()

    def send(self, *message: object) -> None:
        """Send one message."""
        body = pack(list(message))
        self.connection.sendall(struct.pack("<I", len(body)) + body)

    def receive(self, code: int) -> list[Any]:
        """Return the next message, which must be of this type."""
        (size,) = struct.unpack("<I", self._read(4))
        message: list[Any] = unpack(self._read(size), 0)[0]
        if message[0] in (REFUSED, REQUEST_FAILED):
            raise RuntimeError(message[1 if message[0] == REFUSED else 2][1])  # the message of the error
        if message[0] != code:
            raise RuntimeError(f"message {message[0]} instead of {code}")
        return message

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.connection.recv(size - len(data))
            if not piece:
                raise ConnectionError("the agent closed the connection")
            data += piece
        return data


if __name__ == "__main__":
    path, job, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    client = Client(path, job, rank, size)
    for count in (3, 1_000_000):
        total = client.all_reduce(array.array("f", [rank + 1] * count), name=f"sum of {count}")
        print(f"rank {rank} of {size} on {client.node}: {len(total)} x {total[0]}", flush=True)
        if total != array.array("f", [size * (size + 1) / 2] * count):
            raise SystemExit("the sum is wrong")
    client.close()
