"""Which certificate of those that an agent is believed by ends first: its own, one between, or the authority's."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

# Whole blocks only, and nothing in them but base64: OpenSSL has read the file already.
_BLOCK: Final = re.compile(
    rb"^(?:\xef\xbb\xbf)?(-----BEGIN ((?:TRUSTED |X509 )?CERTIFICATE)-----[A-Za-z0-9+/=\s]+-----END \2-----)",
    re.MULTILINE,
)


class Role(Enum):
    """What a certificate is to the agent that shows it."""

    NODE = "node"
    BETWEEN = "between"
    AUTHORITY = "authority"


@dataclass(frozen=True, slots=True)
class End:
    """The first end among the certificates that an agent is believed by.

    ``file``: the certificate is in it; ``subject``: its name; ``at``: seconds since 1970.
    """

    role: Role
    file: str
    subject: str
    at: float

    def hint(self, node: str) -> str:
        """Return what gives the agent of ``node`` a later end."""
        if self.role is Role.NODE:
            return f"allreduced certs node --force {node}"
        if self.role is Role.BETWEEN:
            return f"put one that ends later into {self.file}"
        return "put a new authority into security.ca beside this one on all nodes, see docs/security.md"


@dataclass(frozen=True, slots=True)
class _Authority:
    """A certificate that may sign others."""

    der: bytes
    shown: Mapping[str, object]

    @property
    def is_root(self) -> bool:
        return self.shown["subject"] == self.shown["issuer"]


def first_end(
    own: Mapping[str, object],
    certificate: tuple[str, bytes],
    ca: tuple[str, bytes],
    accepted: Callable[[str], bool],
) -> End:
    """Return which certificate ends first.

    ``own``: the node's, as ``getpeercert`` gives it. ``certificate``, ``ca``: path and content of the two files.
    ``accepted`` tells whether the node's certificate is accepted by who knows these authorities only, in PEM.

    Of several roots that the node is believed by the one that ends last counts.
    """
    between = [(certificate[0], found) for found in _authorities(certificate[1]) if not found.is_root]
    trusted = [(ca[0], found) for found in _authorities(ca[1])]
    above = _above(own, [*between, *trusted])
    ends = [_end(Role.NODE, certificate[0], own)]
    ends += [_end(Role.BETWEEN, file, found.shown) for file, found in above if not found.is_root]
    roots = sorted((found for _, found in above if found.is_root), key=_ends_at)
    rest = [found for _, found in trusted]
    for root in roots:
        rest.remove(root)
        if root is roots[-1] or not accepted("".join(ssl.DER_cert_to_PEM_cert(found.der) for found in rest)):
            ends.append(_end(Role.AUTHORITY, ca[0], root.shown))
            break
    # Where both end at once, a new certificate of the node would not end later: the authority is the one to replace.
    return min(reversed(ends), key=lambda end: end.at)


def _above(own: Mapping[str, object], candidates: Sequence[tuple[str, _Authority]]) -> list[tuple[str, _Authority]]:
    """Return those that the node's certificate leads to by the names of who signed it, and who signed them."""
    names, found = [own["issuer"]], []
    for name in names:
        for file, authority in candidates:
            if authority.shown["subject"] == name and (file, authority) not in found:
                found.append((file, authority))
                names.append(authority.shown["issuer"])  # and it is looked at later in this loop
    return found


def _authorities(data: bytes) -> Iterator[_Authority]:
    """Yield the certificates in a file that may sign others, each once."""
    seen = set()
    for block, _ in _BLOCK.findall(data):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=block.decode("ascii"))
        for der, shown in zip(context.get_ca_certs(binary_form=True), context.get_ca_certs(), strict=True):
            if der not in seen:
                seen.add(der)
                yield _Authority(der, shown)


def _ends_at(authority: _Authority) -> float:
    return _seconds(authority.shown)


def _seconds(shown: Mapping[str, object]) -> float:
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _end(role: Role, file: str, shown: Mapping[str, object]) -> End:
    subject = shown.get("subject", ())
    names = [(kind, text) for part in subject for kind, text in part] if isinstance(subject, tuple) else []
    common = [text for kind, text in names if kind == "commonName"]
    return End(role, file, common[0] if common else ", ".join(text for _, text in names), _seconds(shown))
