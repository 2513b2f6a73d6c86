"""The shared-secret handshake between agents, sans-IO. It comes first on every connection, control and data flow.

The dialler sends a hello, the listener a challenge, the dialler its proof, the listener its own. A proof is an
HMAC-SHA256 over both first messages byte by byte (versions, names, incarnations, fresh nonces, session, flow), under
a label of its role, so neither a replay nor a reflection nor a message of another flow fits. The finished control
flow gives both sides a key of the session, and its data flows prove that key instead of the secret.

Without a secret the same messages run under an empty key: that keeps out strays and mistakes, not attackers.

In an encrypted connection the proofs also cover its binding, so that they hold nowhere else, and the name that a side
claims must be one of its certificate's.

A message is ``magic, type u8, body length u16`` and a body, little-endian, at most ``MAX_MESSAGE`` bytes in all.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn
from weakref import WeakValueDictionary

from allreduced.core.channel import CertificateError, Channel
from allreduced.core.errors import AllReducedError, AuthenticationError, ProtocolError
from allreduced.core.identity import PeerIdentity

LOWEST_VERSION = 1
HIGHEST_VERSION = 2
"""Of the agents' protocol. ``protocol.peer.SINCE`` tells what came with each."""

MAX_MESSAGE = 512
"""Bytes of one handshake message at most, header included."""

MAX_FLOWS = 64
"""Data flows that a link may have."""

MAX_NODE_NAME = 255
"""Bytes of a node's name in UTF-8 at most."""

MAGIC = b"\xa7allred\n"
_HEADER = struct.Struct("<8sBH")
_HELLO = struct.Struct("<HHBHHQ32s16sB")  # lowest, highest, secret, flow, flows, incarnation, nonce, session, name
_CHALLENGE = struct.Struct("<HHHBQ32s16sB")  # version, lowest, highest, secret, incarnation, nonce, session, name
_PROOF = struct.Struct("<32s")
_REFUSAL = struct.Struct("<BHH")  # reason, lowest, highest version of the listener

_NONCE = 32
_SESSION = 16

# Message types
_T_HELLO, _T_CHALLENGE, _T_PROOF, _T_ACCEPT, _T_REFUSAL = 1, 2, 3, 4, 5

# Reasons of a refusal. They tell nothing that the dialler could not find out by asking.
_WRONG_SECRET, _SECRET_HERE_ONLY, _SECRET_THERE_ONLY, _VERSION, _SELF, _SESSION_UNKNOWN = 1, 2, 3, 4, 5, 6
_NOT_ENCRYPTED, _WRONG_NAME, _NOT_LISTED = 7, 8, 9

_SAME_SECRET = "set the same ALLREDUCED_SECRET on all nodes"
_SAME_MODE = 'set security.mode = "mtls" on all nodes, or on none'
_RIGHT_NAME = "agent.node must be a DNS name of the certificate: allreduced certs node NAME makes one"
_IN_THE_LIST = "name all nodes in peers.static, on all nodes, or leave it empty"

_TLS_BEGINS = b"\x16"
"""How a connection begins that is encrypted; only those come here that should not be."""
_TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""What says in TLS that it is not spoken here (alert protocol_version)."""


class ConnectedToSelf(ProtocolError):
    """The address that was dialled leads back to this very agent."""

    code = "connected_to_self"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Session:
    """What the flows of one link share. Lives as long as a handshake of its control flow does."""

    name: bytes
    key: bytes
    peer: PeerIdentity
    flows: int


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the handshakes of one agent are made with."""

    node: bytes
    incarnation: int
    secret: bytes
    lowest: int
    highest: int
    random: Callable[[int], bytes]
    encrypted: bool
    listed: Callable[[], frozenset[str] | None]


class SecretAuthenticator:
    """Makes the handshakes of one agent. Implements ``transports.base.Authenticator``.

    ``incarnation``: unsigned 64 bits, another at each start. ``secret``: empty where there is none. ``random(n)``
    returns ``n`` unpredictable bytes. ``encrypted``: only encrypted connections are taken, and of them only those of
    nodes that ``listed()`` names, where that is not None. A link's data flows can be opened while the handshake object
    of its control flow is referenced by whoever made it.

    :raises ValueError: the node name is empty or longer than ``MAX_NODE_NAME`` bytes, or the incarnation out of range.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        secret: bytes = b"",
        *,
        random: Callable[[int], bytes] = secrets.token_bytes,
        lowest: int = LOWEST_VERSION,
        highest: int = HIGHEST_VERSION,
        encrypted: bool = False,
        listed: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        name = node.encode()
        if not 0 < len(name) <= MAX_NODE_NAME:
            raise ValueError(f"a node name has 1 to {MAX_NODE_NAME} bytes, this one has {len(name)}")
        if not 0 <= incarnation < 1 << 64:
            raise ValueError(f"an incarnation has 64 bits, this is {incarnation}")
        self._setup = _Setup(name, incarnation, secret, lowest, highest, random, encrypted, listed)
        self._sessions: WeakValueDictionary[bytes, _Session] = WeakValueDictionary()

    def dial(self, session: bytes, flow: int, flows: int, channel: Channel | None = None) -> DiallerHandshake:
        """Return the initiator's side for one flow of a link; ``session`` is empty for the control flow (flow 0).

        ``channel``: the encrypted connection that it runs in.

        :raises ValueError: the session is not one that this authenticator finished, or flow and flows do not fit.
        """
        if not 0 <= flow <= flows <= MAX_FLOWS or flows < 1 or (flow == 0) != (session == b""):
            raise ValueError(f"flow {flow} of {flows} with session {session!r} cannot be")
        known = self._sessions.get(session) if flow else None
        if flow and known is None:
            raise ValueError("the session of this data flow is not known")
        return DiallerHandshake(self._setup, self._sessions, known, flow, flows, channel)

    def answer(self, channel: Channel | None = None) -> ListenerHandshake:
        """Return the listener's side for one incoming connection; ``channel`` as with ``dial``."""
        return ListenerHandshake(self._setup, self._sessions, channel)


class _Side(abc.ABC):
    """What both sides share: the buffer, the framing, the facts at the end."""

    _expects: Mapping[int, tuple[int, int]]
    """Message types that may come now, with the shortest and longest body."""

    _role: ClassVar[bytes]
    _other_role: ClassVar[bytes]

    def __init__(self, setup: _Setup, sessions: WeakValueDictionary[bytes, _Session], channel: Channel | None) -> None:
        self._setup = setup
        self._sessions = sessions
        self._channel = channel
        self._buffer = bytearray()
        self._failed = False
        self._refusal = b""
        self._finished = False
        self._peer: PeerIdentity | None = None
        self._session: _Session | None = None
        self._flow = 0
        self._version = 0
        self._key = b""
        self._transcript = b""

    def receive(self, data: bytes) -> bytes:
        """Take bytes in pieces of any size and return what to send, maybe nothing.

        After an error, and after the end, nothing more is answered.

        :raises AuthenticationError: the other side does not have the secret.
        :raises ProtocolError: the bytes are not a handshake of a common version.
        """
        if self._failed:
            return b""
        self._buffer += data
        answer = bytearray()
        while not self._finished:
            message = self._next_message()
            if message is None:
                break
            answer += self._handle(*message)
        return bytes(answer)

    @property
    def refusal(self) -> bytes:
        """What to send before the connection is dropped, after ``receive`` raised. Empty: answer nothing."""
        return self._refusal

    @property
    def finished(self) -> bool:
        """True when both sides are satisfied."""
        return self._finished

    @property
    def peer(self) -> PeerIdentity:
        """Who the other side proved to be."""
        return self._done().peer

    @property
    def session(self) -> bytes:
        """16 bytes that name the link; all its flows share them."""
        return self._done().name

    @property
    def flow(self) -> int:
        """0 for the control flow, 1 … flows for data flows."""
        self._done()
        return self._flow

    @property
    def flows(self) -> int:
        """How many data flows the link has."""
        return self._done().flows

    @property
    def version(self) -> int:
        """The version of the protocol that both sides speak."""
        self._done()
        return self._version

    @property
    def trailing(self) -> bytes:
        """Bytes received behind the handshake; they belong to the flow."""
        self._done()
        return bytes(self._buffer)

    @abc.abstractmethod
    def _handle(self, kind: int, body: bytes, raw: bytes) -> bytes:
        """Take one message of an expected type and return the answer."""

    def _done(self) -> _Session:
        if not self._finished or self._session is None:
            raise RuntimeError("the handshake is not finished")
        return self._session

    def _next_message(self) -> tuple[int, bytes, bytes] | None:
        """Cut the next whole message off the buffer. A byte that cannot be right fails at once."""
        buffer = self._buffer
        start = min(len(buffer), len(MAGIC))
        if buffer[:start] != MAGIC[:start]:
            if buffer.startswith(_TLS_BEGINS) and self._channel is None:
                self._refusal = _TLS_ALERT
                self._fail(CertificateError("the peer uses TLS, this agent does not", hint=_SAME_MODE))
            self._fail(ProtocolError("the other side does not speak the protocol of allreduced agents"))
        if len(buffer) < _HEADER.size:
            return None
        _, kind, length = _HEADER.unpack_from(buffer)
        allowed = self._expects.get(kind)
        if allowed is None or not allowed[0] <= length <= allowed[1]:
            self._fail(ProtocolError(f"handshake message of type {kind} with {length} bytes is not allowed here"))
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        raw = bytes(buffer[:end])
        del buffer[:end]
        return kind, raw[_HEADER.size :], raw

    def _fail(self, error: AllReducedError, reason: int = 0) -> NoReturn:
        self._failed = True
        if reason:
            self._refusal = _message(_T_REFUSAL, _REFUSAL.pack(reason, self._setup.lowest, self._setup.highest))
        raise error

    def _identity(self, body: bytes, fixed: int, length: int, incarnation: int) -> PeerIdentity:
        """Return who the other side claims to be; ``fixed`` bytes precede the name of ``length`` bytes."""
        name = body[fixed:]
        if len(name) != length or not name:
            self._fail(ProtocolError("a handshake message has a node name of the wrong length"))
        try:
            return PeerIdentity(name.decode(), incarnation)
        except UnicodeDecodeError:
            self._fail(ProtocolError("a handshake message has a node name that is not UTF-8"))

    def _check_name(self, peer: PeerIdentity) -> None:
        """Check that the other side may bear the name that it claims."""
        if self._channel is None:
            if self._setup.encrypted:
                error = CertificateError(f"node {peer.node!r} does not use TLS, this agent does", hint=_SAME_MODE)
                self._fail(error, _NOT_ENCRYPTED)
            return
        if peer.node not in self._channel.names:
            names = ", ".join(sorted(self._channel.names)) or "no node"
            error = CertificateError(
                f"the peer calls itself {peer.node!r}, and its certificate is for {names}", hint=_RIGHT_NAME
            )
            self._fail(error, _WRONG_NAME)
        listed = self._setup.listed()
        if listed is not None and peer.node not in listed:
            error = CertificateError(f"node {peer.node!r} is not in the list of peers", hint=_IN_THE_LIST)
            self._fail(error, _NOT_LISTED)

    def _refused(self, reason: int, lowest: int, highest: int) -> NoReturn:
        """Raise what a refusal of the other side means."""
        if reason == _WRONG_SECRET:
            self._fail(AuthenticationError("the peer has another secret", hint=_SAME_SECRET))
        if reason in (_SECRET_HERE_ONLY, _SECRET_THERE_ONLY):
            self._fail(_secret_missing(here=reason == _SECRET_THERE_ONLY))
        if reason == _VERSION:
            self._fail(_version_error(self._setup, lowest, highest))
        if reason == _SELF:
            self._fail(_self_error())
        if reason == _SESSION_UNKNOWN:
            self._fail(ProtocolError("the peer does not know the link of this data flow any more"))
        if reason == _NOT_ENCRYPTED:
            self._fail(CertificateError("the peer uses TLS, this agent does not", hint=_SAME_MODE))
        node = self._setup.node.decode()
        if reason == _WRONG_NAME:
            text = f"the peer refuses this agent: its certificate is not for {node!r}, as the agent is called"
            self._fail(CertificateError(text, hint=_RIGHT_NAME))
        if reason == _NOT_LISTED:
            text = f"the peer refuses this agent: {node!r} is not in the peer's list"
            self._fail(CertificateError(text, hint=_IN_THE_LIST))
        self._fail(ProtocolError(f"the peer refused the connection for the unknown reason {reason}"))

    def _begin(self, known: _Session | None, hello: bytes, challenge: bytes) -> None:
        """Fix key and transcript, once both first messages are there."""
        binding = self._channel.binding if self._channel is not None else b""
        self._transcript = hashlib.sha256(hello + challenge + binding).digest()
        self._key = known.key if known is not None else _mac(self._setup.secret, b"allreduced control flow")

    def _proof(self, role: bytes) -> bytes:
        return _mac(self._key, role + self._transcript)

    def _complete(self, known: _Session | None, name: bytes, peer: PeerIdentity, flows: int) -> None:
        if known is None:
            key = _mac(self._setup.secret, b"allreduced session" + self._transcript)
            known = self._sessions[name] = _Session(name, key, peer, flows)
        self._session = known
        self._finished = True


class DiallerHandshake(_Side):
    """The initiator's side of one flow. Implements ``transports.base.Handshake``."""

    _role = b"dialler"
    _other_role = b"listener"

    def __init__(
        self,
        setup: _Setup,
        sessions: WeakValueDictionary[bytes, _Session],
        known: _Session | None,
        flow: int,
        flows: int,
        channel: Channel | None,
    ) -> None:
        super().__init__(setup, sessions, channel)
        self._known = known
        self._flow = flow
        self._flows = flows
        self._name = b""
        self._claimed: PeerIdentity | None = None
        fields = _HELLO.pack(
            setup.lowest,
            setup.highest,
            bool(setup.secret),
            flow,
            flows,
            setup.incarnation,
            setup.random(_NONCE),
            known.name if known is not None else bytes(_SESSION),
            len(setup.node),
        )
        self._hello = _message(_T_HELLO, fields + setup.node)
        self._expects = {
            _T_CHALLENGE: (_CHALLENGE.size + 1, _CHALLENGE.size + MAX_NODE_NAME),
            _T_REFUSAL: (_REFUSAL.size, _REFUSAL.size),
        }

    def start(self) -> bytes:
        """Return the hello."""
        return self._hello

    def _handle(self, kind: int, body: bytes, raw: bytes) -> bytes:
        if kind == _T_REFUSAL:
            self._refused(*_REFUSAL.unpack(body))
        if kind == _T_CHALLENGE:
            return self._challenged(body, raw)
        if not hmac.compare_digest(body, self._proof(self._other_role)) or self._claimed is None:
            self._fail(AuthenticationError("the peer has another secret", hint=_SAME_SECRET))
        self._complete(self._known, self._name, self._claimed, self._flows)
        return b""

    def _challenged(self, body: bytes, raw: bytes) -> bytes:
        setup = self._setup
        version, lowest, highest, secret, incarnation, _, name, length = _CHALLENGE.unpack_from(body)
        peer = self._identity(body, _CHALLENGE.size, length, incarnation)
        if version != min(setup.highest, highest) or version < max(setup.lowest, lowest):
            self._fail(_version_error(setup, lowest, highest))
        if bool(secret) != bool(setup.secret):
            self._fail(_secret_missing(here=bool(setup.secret)))
        if incarnation == setup.incarnation:
            self._fail(_self_error())
        if self._known is not None and (name != self._known.name or peer != self._known.peer):
            self._fail(ProtocolError("another agent answered for a data flow than for its control flow"))
        self._check_name(peer)
        self._claimed = peer
        self._version = version
        self._name = name
        self._begin(self._known, self._hello, raw)
        self._expects = {_T_ACCEPT: (_PROOF.size, _PROOF.size), _T_REFUSAL: (_REFUSAL.size, _REFUSAL.size)}
        return _message(_T_PROOF, self._proof(self._role))


class ListenerHandshake(_Side):
    """The listener's side of one incoming connection. Implements ``transports.base.Handshake``."""

    _role = b"listener"
    _other_role = b"dialler"

    def __init__(self, setup: _Setup, sessions: WeakValueDictionary[bytes, _Session], channel: Channel | None) -> None:
        super().__init__(setup, sessions, channel)
        self._known: _Session | None = None
        self._flows = 0
        self._name = b""
        self._claimed: PeerIdentity | None = None
        self._expects = {_T_HELLO: (_HELLO.size + 1, _HELLO.size + MAX_NODE_NAME)}

    def start(self) -> bytes:
        """Return nothing: the dialler speaks first."""
        return b""

    def _handle(self, kind: int, body: bytes, raw: bytes) -> bytes:
        if kind == _T_REFUSAL:
            self._refused(*_REFUSAL.unpack(body))
        if kind == _T_HELLO:
            return self._greeted(body, raw)
        if not hmac.compare_digest(body, self._proof(self._other_role)) or self._claimed is None:
            self._fail(
                AuthenticationError("the peer uses another secret", hint=_SAME_SECRET),
                _WRONG_SECRET if self._known is None else _SESSION_UNKNOWN,
            )
        self._complete(self._known, self._name, self._claimed, self._flows)
        return _message(_T_ACCEPT, self._proof(self._role))

    def _greeted(self, body: bytes, raw: bytes) -> bytes:
        setup = self._setup
        lowest, highest, secret, flow, flows, incarnation, _, session, length = _HELLO.unpack_from(body)
        peer = self._identity(body, _HELLO.size, length, incarnation)
        if not 0 <= flow <= flows <= MAX_FLOWS or flows < 1 or lowest > highest:
            self._fail(ProtocolError(f"a hello for flow {flow} of {flows}, versions {lowest} to {highest}"))
        version = min(setup.highest, highest)
        if version < max(setup.lowest, lowest):
            self._fail(_version_error(setup, lowest, highest), _VERSION)
        if incarnation == setup.incarnation:
            self._fail(_self_error(), _SELF)
        self._check_name(peer)
        if bool(secret) != bool(setup.secret):
            here = bool(setup.secret)
            self._fail(_secret_missing(here=here), _SECRET_HERE_ONLY if here else _SECRET_THERE_ONLY)
        if flow:
            self._known = self._sessions.get(session)
            if self._known is None or self._known.peer != peer or self._known.flows != flows:
                self._fail(ProtocolError("a data flow of a link that is not being made here"), _SESSION_UNKNOWN)
        self._claimed = peer
        self._version = version
        self._flow = flow
        self._flows = flows
        self._name = session if flow else setup.random(_SESSION)
        fields = _CHALLENGE.pack(
            version,
            setup.lowest,
            setup.highest,
            bool(setup.secret),
            setup.incarnation,
            setup.random(_NONCE),
            self._name,
            len(setup.node),
        )
        challenge = _message(_T_CHALLENGE, fields + setup.node)
        self._begin(self._known, raw, challenge)
        self._expects = {_T_PROOF: (_PROOF.size, _PROOF.size), _T_REFUSAL: (_REFUSAL.size, _REFUSAL.size)}
        return challenge


def _message(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, kind, len(body)) + body


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _secret_missing(*, here: bool) -> AuthenticationError:
    if here:
        return AuthenticationError("the peer uses no secret, this agent has one", hint=_SAME_SECRET)
    return AuthenticationError("the peer uses a secret, this agent has none", hint=_SAME_SECRET)


def _version_error(setup: _Setup, lowest: int, highest: int) -> ProtocolError:
    return ProtocolError(
        f"the peer speaks versions {lowest} to {highest} of the agents' protocol,"
        f" this agent {setup.lowest} to {setup.highest}",
        hint="install versions of allreduced that are at most one apart on all nodes",
    )


def _self_error() -> ConnectedToSelf:
    return ConnectedToSelf("the address leads to this agent itself", hint="take it out of the list of peers")
