"""Which requests the HTTP server answers. Pure decisions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus

import h11

from allreduced.daemon.metrics.hosts import host_of, is_allowed


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no answer: the status, and the reason for people. ``headers``: further ones of the response."""

    status: HTTPStatus
    reason: str
    headers: tuple[tuple[str, str], ...] = ()


def refusal_of(request: h11.Request, local: str, names: Collection[str]) -> Refusal | None:
    """Return why a request is refused, whatever its path; None where it is not.

    ``local``: the address that the connection came in at. ``names``: host names that may be asked for, in lower case.
    """
    hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
    if hosts:  # HTTP/1.0 may do without, which browsers do not
        host = host_of(hosts[0])
        if host is None:
            return Refusal(HTTPStatus.BAD_REQUEST, "the Host header is malformed")
        if not is_allowed(host, local, names):
            reason = "this server has another name; see metrics.hosts in its settings"
            return Refusal(HTTPStatus.MISDIRECTED_REQUEST, reason)
    if request.http_version not in (b"1.0", b"1.1"):
        return Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1")
    if not request.target.startswith(b"/"):
        return Refusal(HTTPStatus.BAD_REQUEST, "the target must be a path")
    if request.method not in (b"GET", b"HEAD"):
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", (("Allow", "GET, HEAD"),))
    if _has_body(request):
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request must have no body")
    return None


def path_of(request: h11.Request) -> str:
    """Return the path that is asked for, without what follows a question mark."""
    return request.target.decode("latin-1").partition("?")[0]


def _has_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in request.headers
    )
