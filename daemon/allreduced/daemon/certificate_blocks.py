"""The blocks of certificates in a file of PEM, and whether OpenSSL reads all of them.

OpenSSL passes over a block that does not begin at the beginning of a line, and says nothing. What is before it cannot
always be seen: files that were put together from several may have a byte order mark in the middle.
"""

from __future__ import annotations

import os
import re
import shlex
import ssl
from dataclasses import dataclass
from typing import Final

_BLOCK: Final = re.compile(rb"-----BEGIN ((?:TRUSTED |X509 )?CERTIFICATE)-----[A-Za-z0-9+/=\s]+-----END \1-----")
_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A file of which OpenSSL does not read all certificates.

    ``there``, ``read``: how many are in it, and are read. ``line``: where the first of the others begins, 0 where that
    is not known. ``marked``: a byte order mark is before it.
    """

    there: int
    read: int
    line: int
    marked: bool

    def hint(self, path: str) -> str:
        """Return what mends the file."""
        if not self.line:
            return "each block of PEM begins and ends with a line of its own"
        if self.marked:
            return (
                f"line {self.line} begins with a byte order mark, which editors do not show:"
                f" sed -i '{self.line}s/^\\xef\\xbb\\xbf//' {shlex.quote(path)}"
            )
        return f"-----BEGIN must be at the beginning of line {self.line}"


def passed_over(data: bytes) -> PassedOver | None:
    """Return what OpenSSL does not read of a file with certificates.

    None where it reads all, or refuses the whole file, which it says itself.
    """
    blocks = list(_BLOCK.finditer(data))
    there, read = _count(b"\n".join(block[0] for block in blocks)), _count(data)
    if there is None or read is None or there == read:
        return None
    start = 0
    for block in blocks:
        # A mark does not matter where OpenSSL begins to look for a block: at the beginning, and right after a block.
        if not _count(data[start : block.end()]):
            begin = data.rfind(b"\n", 0, block.start()) + 1
            return PassedOver(there, read, data.count(b"\n", 0, begin) + 1, data[begin : block.start()] == _MARK)
        start = data.find(b"\n", block.end()) + 1 or len(data)
    return PassedOver(there, read, 0, marked=False)


def _count(data: bytes) -> int | None:
    """Return how many different certificates OpenSSL reads; None where it refuses the whole."""
    descriptor = os.memfd_create("allreduced-pem", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(data)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(f"/proc/self/fd/{descriptor}")
        except ssl.SSLError:
            return None
    return context.cert_store_stats()["x509"]
