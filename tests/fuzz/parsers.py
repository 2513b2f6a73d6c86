"""Everything that reads bytes of somebody else, behind one function. The first byte of an input chooses the reader.

What a reader may raise is said here; whatever else it raises is a fault. What it takes must be written and read again
as the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from allreduced.core.errors import AuthenticationError, InternalError, ProtocolError, from_wire
from allreduced.core.identity import PeerIdentity
from allreduced.protocol import local, peer
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import MAX_CONTROL, MAX_FRAME, Handshake
from allreduced.transports.rdma import negotiation
from allreduced.transports.rdma import wire as rdma_wire
from allreduced.transports.tcp import wire

Reader = Callable[[bytes], None]


class Packed(Protocol):
    """What is written by a method of its own."""

    def pack(self) -> bytes:
        """Return it as bytes."""


_SECRET: Final = b"secret"
_ERRORS: Final = {"Refused", "RequestFailed", "GroupEnded", "Refuse", "Broken", "Abort"}


def parse(data: bytes) -> None:
    """Give an input to its reader.

    :raises Exception: the reader has a fault.
    """
    if data:
        READERS[data[0] % len(READERS)](data[1:])


def _agent_body(data: bytes) -> None:
    """Take what a client sends, without the length."""
    try:
        message = local.decode_to_agent(data)
    except ProtocolError:
        return
    _same(message, local.decode_to_agent(local.encode(message)[4:]))


def _client_body(data: bytes) -> None:
    """Take what an agent sends to its client."""
    try:
        message = local.decode_to_client(data)
    except ProtocolError:
        return
    if type(message).__name__ in _ERRORS:
        str(from_wire(message.error))  # type: ignore[union-attr] # those that have one
    try:
        again = local.encode(message)
    except InternalError:  # longer than it came: numbers may be told in few bytes, errors are bounded anew
        return
    _same(message, local.decode_to_client(again[4:]))


def _stream(data: bytes, decode: Callable[[bytes | bytearray], object]) -> None:
    if not data:
        return
    reader = MessageReader(local.MAX_MESSAGE)
    cut = data[0]
    try:
        for piece in (data[1 : 1 + cut], data[1 + cut :]):
            for body in reader.feed(piece):
                decode(body)
    except ProtocolError:
        return


def _agent_stream(data: bytes) -> None:
    """Take a client's stream, in two pieces."""
    _stream(data, local.decode_to_agent)


def _client_stream(data: bytes) -> None:
    """Take an agent's stream to a client, in two pieces."""
    _stream(data, local.decode_to_client)


def _frame(data: bytes) -> None:
    """Take a control frame of another agent."""
    try:
        frame = peer.decode(data)
    except ProtocolError:
        return
    if type(frame).__name__ in _ERRORS:
        str(from_wire(frame.error))  # type: ignore[union-attr] # those that have one
    try:
        again = peer.encode(frame)
    except InternalError:
        return
    _same(frame, peer.decode(again))


def _frame_body(data: bytes) -> None:
    """Do the same behind a header that is right, so that bodies of all types are reached."""
    if len(data) < 2:
        return
    code = CODES[data[0] % len(CODES)]
    group, generation = (7, 1) if data[1] & 1 else (0, 0)
    body = data[2:]
    _frame(peer.HEADER.pack(peer.MAGIC, peer.VERSION, code, 0, generation, group, len(body)) + body)


CODES: Final = sorted(peer.CODES.values())


def _random(nbytes: int) -> bytes:
    return bytes(nbytes)


def _agent(name: str, incarnation: int) -> SecretAuthenticator:
    return SecretAuthenticator(name, incarnation, _SECRET, random=_random)


_HERE: Final = _agent("here", 1)
_THERE: Final = _agent("there", 2)


def _shake(handshake: Handshake, data: bytes) -> None:
    handshake.start()
    try:
        for at in range(0, len(data), 100):
            handshake.receive(data[at : at + 100])
            if handshake.finished and not isinstance(handshake.peer, PeerIdentity):
                raise TypeError("a finished handshake does not tell who the peer is")
    except (ProtocolError, AuthenticationError):
        if len(handshake.refusal) > 64:
            raise ValueError("a refusal tells too much") from None


def _listener(data: bytes) -> None:
    """Take what a stranger sends to the listening port."""
    _shake(_HERE.answer(), data)


def _listener_proof(data: bytes) -> None:
    """Take what a stranger sends behind a hello that is right."""
    handshake = _HERE.answer()
    handshake.receive(_THERE.dial(b"", 0, 2).start())
    _shake(handshake, data)
    if handshake.finished:
        raise ValueError("who does not know the secret was believed")


def _dialler(data: bytes) -> None:
    """Take what a stranger answers to an agent that dials it."""
    handshake = _HERE.dial(b"", 0, 2)
    _shake(handshake, data)
    if handshake.finished:
        raise ValueError("who does not know the secret was believed")


def _control_flow(data: bytes) -> None:
    """Take the control flow of a link, as the TCP transport reads it."""
    at = 0
    try:
        while len(data) - at >= wire.CONTROL_HEADER:
            _, length = wire.read_control_header(data, at, MAX_CONTROL)
            at += wire.CONTROL_HEADER + length
            if at <= len(data) and length:
                peer.decode(data[at - length : at])
    except ProtocolError:
        return


def _data_flow(data: bytes) -> None:
    """Take the headers on a data flow."""
    at = 0
    try:
        while len(data) - at >= wire.DATA_HEADER:
            _, length, _, _, _ = wire.read_data_header(data[at : at + wire.DATA_HEADER], MAX_FRAME)
            at += wire.DATA_HEADER + length
    except ProtocolError:
        return


def _rdma_negotiation(data: bytes) -> None:
    """Take an offer, or an answer to one, of an agent that wants queue pairs."""
    try:
        if data[:1] == bytes([negotiation.ANSWER]):
            answer = negotiation.read_answer(data)
            _same(answer, negotiation.read_answer(negotiation.answer(answer.side, answer.version)))
        else:
            offered = negotiation.read_offer(data)
            negotiation.common_version(offered)
            _same(offered.side, negotiation.read_offer(negotiation.offer(offered.side)).side)
    except ProtocolError:
        return


def _rdma_message(data: bytes) -> None:
    """Take a message of a queue pair; behind an announcement, an immediate of four bytes."""
    try:
        kind, *_ = rdma_wire.read_header(memoryview(data))
        if kind != rdma_wire.ANNOUNCE:
            return
        announced = rdma_wire.read_announcement(memoryview(data[: rdma_wire.ANNOUNCE_SIZE]))
        _same(announced, rdma_wire.read_announcement(memoryview(announced.pack())))
        immediate = int.from_bytes(data[rdma_wire.ANNOUNCE_SIZE :][:4], "little")
        for length in (announced.frame, announced.total % announced.frame, 0):
            offset = announced.offset_of(immediate, length)
            if not announced.base <= offset <= offset + length <= announced.base + announced.total:
                raise ValueError(f"a frame of {length} bytes at {offset}, outside of {announced}")
    except ProtocolError:
        return


def _packed(data: bytes, read: Callable[[bytes], Packed]) -> None:
    try:
        found = read(data)
    except ProtocolError:
        return
    _same(found, read(found.pack()))


def _rdma_token(data: bytes) -> None:
    """Take what names a posted receive."""
    _packed(data, rdma_wire.read_token)


def _rdma_carrier(data: bytes) -> None:
    """Take what the two ends of a link tell each other beside the data."""
    _packed(data, rdma_wire.read_carrier)


def _same(first: object, second: object) -> None:
    if first != second:
        raise ValueError(f"{first!r} was written and read again as {second!r}")


READERS: Final[tuple[Reader, ...]] = (
    _agent_body,
    _client_body,
    _agent_stream,
    _client_stream,
    _frame,
    _frame_body,
    _listener,
    _listener_proof,
    _dialler,
    _control_flow,
    _data_flow,
    _rdma_negotiation,
    _rdma_message,
    _rdma_token,
    _rdma_carrier,
)
