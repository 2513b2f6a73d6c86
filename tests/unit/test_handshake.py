"""The handshake between agents: two honest sides agree, anything else ends in a clear error or in silence."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import pytest

from allreduced.core.channel import Channel
from allreduced.core.errors import AllReducedError, AuthenticationError, ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.protocol.handshake import (
    MAX_FLOWS,
    MAX_MESSAGE,
    ConnectedToSelf,
    DiallerHandshake,
    ListenerHandshake,
    SecretAuthenticator,
)
from allreduced.transports.base import Authenticator, Handshake

SECRET = b"a secret of some length"


def _bytes(seed: str) -> Callable[[int], bytes]:
    """Return a source of reproducible bytes, never the same twice."""
    count = 0

    def draw(nbytes: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(f"{seed} {count}".encode()).digest(nbytes)

    return draw


def _agent(
    node: str, incarnation: int, secret: bytes = SECRET, *, seed: str = "", lowest: int = 1, highest: int = 1
) -> SecretAuthenticator:
    return SecretAuthenticator(node, incarnation, secret, random=_bytes(seed or node), lowest=lowest, highest=highest)


def _talk(dialler: Handshake, listener: Handshake) -> list[bytes]:
    """Carry whole messages between both sides until nobody speaks; return the messages."""
    messages = []
    data = dialler.start()
    to_listener = True
    while data:
        messages.append(data)
        data = listener.receive(data) if to_listener else dialler.receive(data)
        to_listener = not to_listener
    return messages


def _control(a: SecretAuthenticator, b: SecretAuthenticator, flows: int = 2) -> tuple[Handshake, Handshake]:
    dialler, listener = a.dial(b"", 0, flows), b.answer()
    _talk(dialler, listener)
    return dialler, listener


def test_the_contract_of_transports_is_met() -> None:
    authenticator: Authenticator = _agent("a", 1)
    dialler: Handshake = authenticator.dial(b"", 0, 1)
    listener: Handshake = authenticator.answer()
    assert isinstance(dialler, DiallerHandshake)
    assert isinstance(listener, ListenerHandshake)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_sides_agree(secret: bytes) -> None:
    a, b = _agent("a", 1, secret), _agent("b", 2, secret)
    dialler, listener = a.dial(b"", 0, 3), b.answer()
    assert listener.start() == b""
    messages = _talk(dialler, listener)
    assert len(messages) == 4
    assert dialler.finished
    assert listener.finished
    assert (dialler.peer, listener.peer) == (PeerIdentity("b", 2), PeerIdentity("a", 1))
    assert dialler.session == listener.session
    assert len(dialler.session) == 16
    assert (dialler.flow, dialler.flows) == (listener.flow, listener.flows) == (0, 3)
    assert dialler.trailing == listener.trailing == b""
    for flow in (1, 2, 3):
        data, answer = a.dial(dialler.session, flow, 3), b.answer()
        _talk(data, answer)
        assert (data.flow, answer.flow, answer.flows) == (flow, flow, 3)
        assert data.session == answer.session == dialler.session
        assert (data.peer, answer.peer) == (PeerIdentity("b", 2), PeerIdentity("a", 1))


def test_byte_by_byte() -> None:
    dialler, listener = _agent("a", 1).dial(b"", 0, 2), _agent("b", 2).answer()
    data = dialler.start()
    sides: tuple[Handshake, Handshake] = listener, dialler
    while data:
        answer = b""
        for k in range(len(data)):
            assert answer == b""
            answer = sides[0].receive(data[k : k + 1])
        data, sides = answer, sides[::-1]
    assert dialler.finished
    assert listener.finished


def test_bytes_behind_the_handshake_belong_to_the_flow() -> None:
    dialler, listener = _agent("a", 1).dial(b"", 0, 2), _agent("b", 2).answer()
    proof = dialler.receive(listener.receive(dialler.start()))
    accept = listener.receive(proof + b"first data")
    dialler.receive(accept + b"other ")
    dialler.receive(b"data")
    assert listener.trailing == b"first data"
    assert dialler.trailing == b"other data"


def test_nothing_is_told_before_the_end() -> None:
    dialler = _agent("a", 1).dial(b"", 0, 2)
    for name in ("peer", "session", "flow", "flows", "trailing"):
        with pytest.raises(RuntimeError):
            getattr(dialler, name)


def test_longest_names_fit() -> None:
    a, b = _agent("ä" * 127 + "a", 1), _agent("b" * 255, 2)
    dialler, listener = a.dial(b"", 0, MAX_FLOWS), b.answer()
    messages = _talk(dialler, listener)
    assert max(map(len, messages)) <= MAX_MESSAGE
    assert listener.peer.node == "ä" * 127 + "a"
    for name in ("", "ä" * 128):
        with pytest.raises(ValueError, match="255"):
            _agent(name, 1, seed="x")
    with pytest.raises(ValueError, match="64 bits"):
        _agent("a", 1 << 64)


@pytest.mark.parametrize("flow", [0, 1])
def test_every_tampered_byte_is_refused(flow: int) -> None:
    """Whichever bit of whichever message is turned over, the side that gets it never finishes."""
    for message in range(4):
        position = 0
        while True:
            a, b = _agent("a", 1), _agent("b", 2)
            control, held = _control(a, b)
            dialler = a.dial(control.session if flow else b"", flow, 2)
            listener = b.answer()
            data = dialler.start()
            sides: tuple[Handshake, Handshake] = listener, dialler
            for _ in range(message):
                data, sides = sides[0].receive(data), sides[::-1]
            if position == len(data):
                assert position > 0
                break
            forged = bytearray(data)
            forged[position] ^= 1 << (position % 8)
            data = bytes(forged)
            try:
                while data:
                    data, sides = sides[0].receive(data), sides[::-1]
            except (AuthenticationError, ProtocolError):
                pass
            assert not dialler.finished
            assert listener.finished == (message == 3)
            assert held.finished
            position += 1


def test_a_replayed_hello_and_proof_are_refused() -> None:
    a, b = _agent("a", 1), _agent("b", 2)
    recorded = _talk(a.dial(b"", 0, 2), b.answer())
    listener = b.answer()
    listener.receive(recorded[0])
    with pytest.raises(AuthenticationError):
        listener.receive(recorded[2])
    assert not listener.finished
    dialler = a.dial(b"", 0, 2)
    dialler.receive(recorded[1])
    with pytest.raises(AuthenticationError):
        dialler.receive(recorded[3])
    assert not dialler.finished


def test_reflected_messages_are_refused() -> None:
    """An attacker without the secret sends an agent its own bytes back, on the same or on another connection."""
    a, b = _agent("a", 1), _agent("b", 2)
    dialler = a.dial(b"", 0, 2)
    with pytest.raises(ProtocolError):
        dialler.receive(dialler.start())
    with pytest.raises(ConnectedToSelf):
        a.answer().receive(a.dial(b"", 0, 2).start())
    first = a.dial(b"", 0, 2)
    challenge = b.answer().receive(first.start())
    proof = first.receive(challenge)
    accept = proof[:8] + b"\x04" + proof[9:]  # the dialler's own proof, dressed up as the listener's
    with pytest.raises(AuthenticationError):
        first.receive(accept)


def test_flows_cannot_be_mixed() -> None:
    a, b = _agent("a", 1), _agent("b", 2)
    one, held_one = _control(a, b)
    two, held_two = _control(a, b)
    first, second = a.dial(one.session, 1, 2), a.dial(two.session, 1, 2)
    answer = b.answer()
    challenge = answer.receive(first.start())
    with pytest.raises(ProtocolError, match="another agent"):
        second.receive(challenge)
    third = a.dial(one.session, 2, 2)
    with pytest.raises(AuthenticationError):
        answer.receive(third.receive(challenge))
    assert answer.refusal
    assert held_one.session != held_two.session


def test_a_data_flow_needs_its_control_flow() -> None:
    a, b = _agent("a", 1), _agent("b", 2)
    control, held = _control(a, b)
    late = a.dial(control.session, 1, 2)
    del held
    answer = b.answer()
    with pytest.raises(ProtocolError, match="not being made here"):
        answer.receive(late.start())
    with pytest.raises(ProtocolError, match="any more"):
        late.receive(answer.refusal)


def test_a_session_is_forgotten_with_its_control_flow() -> None:
    a = _agent("a", 1)
    control, _ = _control(a, _agent("b", 2))
    session = control.session
    del control
    with pytest.raises(ValueError, match="not known"):
        a.dial(session, 1, 2)


def test_a_data_flow_must_fit_its_control_flow() -> None:
    a, b = _agent("a", 1), _agent("b", 2)
    control, held = _control(a, b, flows=2)
    with pytest.raises(ProtocolError):
        b.answer().receive(a.dial(control.session, 1, 3).start())
    for session, flow, flows in (
        (b"", 1, 2),
        (control.session, 0, 2),
        (control.session, 3, 2),
        (b"", 0, 0),
        (b"", 0, 65),
    ):
        with pytest.raises(ValueError, match="cannot be"):
            a.dial(session, flow, flows)
    assert held.finished


def test_another_agent_cannot_open_data_flows() -> None:
    """A node that has the secret is still not let into the session of two others."""
    a, b, c = _agent("a", 1), _agent("b", 2), _agent("c", 3)
    control, held = _control(a, b)
    own, held_own = _control(c, b)
    forged = bytearray(c.dial(own.session, 1, 2).start())
    at = forged.index(own.session)
    forged[at : at + 16] = control.session
    with pytest.raises(ProtocolError):
        b.answer().receive(bytes(forged))
    assert held.finished
    assert held_own.finished


@pytest.mark.parametrize(
    ("mine", "theirs", "here", "there"),
    [
        (b"right", b"wrong", "the peer has another secret", "the peer uses another secret"),
        (b"", b"secret", "the peer uses a secret, this agent has none", "the peer uses no secret, this agent has one"),
        (b"secret", b"", "the peer uses no secret, this agent has one", "the peer uses a secret, this agent has none"),
    ],
)
def test_both_sides_say_what_is_wrong_with_the_secrets(mine: bytes, theirs: bytes, here: str, there: str) -> None:
    dialler, listener = _agent("a", 1, mine).dial(b"", 0, 2), _agent("b", 2, theirs).answer()
    with pytest.raises(AuthenticationError, match=there) as caught:
        _talk(dialler, listener)
    assert caught.value.hint == "set the same ALLREDUCED_SECRET on all nodes"
    assert 0 < len(listener.refusal) <= 32
    with pytest.raises(AuthenticationError, match=here) as told:
        dialler.receive(listener.refusal)
    assert told.value.hint == "set the same ALLREDUCED_SECRET on all nodes"
    assert dialler.refusal == b""
    assert listener.receive(b"more") == dialler.receive(b"more") == b""


def test_the_highest_common_version_is_spoken() -> None:
    for (low, high), (other_low, other_high), version in [
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((2, 2), (1, 9), 2),
    ]:
        dialler = _agent("a", 1, lowest=low, highest=high).dial(b"", 0, 2)
        listener = _agent("b", 2, lowest=other_low, highest=other_high).answer()
        messages = _talk(dialler, listener)
        assert dialler.finished
        assert int.from_bytes(messages[1][11:13], "little") == version


@pytest.mark.parametrize(("mine", "theirs"), [((1, 1), (2, 3)), ((4, 5), (1, 3))])
def test_no_common_version(mine: tuple[int, int], theirs: tuple[int, int]) -> None:
    dialler = _agent("a", 1, lowest=mine[0], highest=mine[1]).dial(b"", 0, 2)
    listener = _agent("b", 2, lowest=theirs[0], highest=theirs[1]).answer()
    with pytest.raises(ProtocolError, match=f"versions {mine[0]} to {mine[1]}.* this agent {theirs[0]} to {theirs[1]}"):
        _talk(dialler, listener)
    with pytest.raises(ProtocolError, match=f"versions {theirs[0]} to {theirs[1]}.* this agent {mine[0]} to {mine[1]}"):
        dialler.receive(listener.refusal)


def test_an_agent_refuses_itself() -> None:
    agent = _agent("a", 1)
    dialler, listener = agent.dial(b"", 0, 2), agent.answer()
    with pytest.raises(ConnectedToSelf):
        _talk(dialler, listener)
    with pytest.raises(ConnectedToSelf, match="this agent itself"):
        dialler.receive(listener.refusal)


@pytest.mark.parametrize(
    "stray",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0", b"\xa7allrex", b"\xff" * 4096],
)
@pytest.mark.parametrize("piece", [1, 4096])
def test_strays_get_no_answer(stray: bytes, piece: int) -> None:
    listener = _agent("b", 2).answer()
    pieces = [stray[at : at + piece] for at in range(0, len(stray), piece)]

    def hear() -> None:
        for data in pieces:
            assert listener.receive(data) == b""

    with pytest.raises(ProtocolError):
        hear()
    assert listener.refusal == b""
    assert listener.receive(_agent("a", 1).dial(b"", 0, 2).start()) == b""


@pytest.mark.parametrize("piece", [1, 4096])
def test_a_dialler_that_uses_tls_is_told_that_this_agent_does_not(piece: int) -> None:
    listener = _agent("b", 2).answer()
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with pytest.raises(AuthenticationError, match="the peer uses TLS, this agent does not"):
        listener.receive(hello[:piece])
    assert listener.refusal == bytes.fromhex("15 0303 0002 0246")  # the alert protocol_version


class _Channels:
    """Two agents in an encrypted connection, and what each may be called by the other's certificate."""

    def __init__(self, a: frozenset[str], b: frozenset[str], *, one: bytes = b"x", other: bytes = b"x") -> None:
        self.of_dialler = Channel(one, b)
        self.of_listener = Channel(other, a)


def _encrypted(
    node: str, incarnation: int, listed: frozenset[str] | None = None, secret: bytes = b"secret"
) -> SecretAuthenticator:
    return SecretAuthenticator(node, incarnation, secret, random=_bytes(node), encrypted=True, listed=lambda: listed)


A, B = frozenset({"a"}), frozenset({"b", "other"})


def test_agents_in_an_encrypted_connection_know_each_other() -> None:
    channels = _Channels(A, B)
    a, b = _encrypted("a", 1, frozenset({"b"})), _encrypted("b", 2, A)
    dialler, listener = a.dial(b"", 0, 2, channels.of_dialler), b.answer(channels.of_listener)
    _talk(dialler, listener)
    assert (dialler.peer.node, listener.peer.node) == ("b", "a")
    data, answer = a.dial(dialler.session, 1, 2, channels.of_dialler), b.answer(channels.of_listener)
    _talk(data, answer)
    assert answer.session == listener.session


@pytest.mark.parametrize("secret", [b"secret", b""])
def test_a_proof_holds_in_its_own_connection_only(secret: bytes) -> None:
    channels = _Channels(A, B, one=b"to somebody between", other=b"from somebody between")
    dialler = _encrypted("a", 1, secret=secret).dial(b"", 0, 2, channels.of_dialler)
    listener = _encrypted("b", 2, secret=secret).answer(channels.of_listener)
    with pytest.raises(AuthenticationError, match="another secret"):
        _talk(dialler, listener)


@pytest.mark.parametrize(
    ("certificate", "listed", "here", "there"),
    [
        (B, None, "calls itself 'a', and its certificate is for b, other", "its certificate is not for 'a'"),
        (frozenset(), None, "its certificate is for no node", "its certificate is not for 'a'"),
        (frozenset({"A", "a.b", "*"}), None, "its certificate is for", "its certificate is not for 'a'"),
        (A, frozenset({"c"}), "node 'a' is not in the list of peers", "'a' is not in the peer's list"),
    ],
)
def test_the_name_of_a_dialler_is_checked(
    certificate: frozenset[str], listed: frozenset[str] | None, here: str, there: str
) -> None:
    channels = _Channels(certificate, B)
    dialler = _encrypted("a", 1).dial(b"", 0, 2, channels.of_dialler)
    listener = _encrypted("b", 2, listed).answer(channels.of_listener)
    with pytest.raises(AuthenticationError, match=re.escape(here)):
        _talk(dialler, listener)
    with pytest.raises(AuthenticationError, match=re.escape(there)):
        dialler.receive(listener.refusal)


@pytest.mark.parametrize(
    ("certificate", "listed", "here", "there"),
    [
        (A, None, "calls itself 'b', and its certificate is for a", "its certificate is not for 'b'"),
        (B, frozenset({"c"}), "node 'b' is not in the list of peers", "'b' is not in the peer's list"),
    ],
)
def test_the_name_of_a_listener_is_checked(
    certificate: frozenset[str], listed: frozenset[str] | None, here: str, there: str
) -> None:
    channels = _Channels(A, certificate)
    dialler = _encrypted("a", 1, listed).dial(b"", 0, 2, channels.of_dialler)
    listener = _encrypted("b", 2).answer(channels.of_listener)
    challenge = listener.receive(dialler.start())
    with pytest.raises(AuthenticationError, match=re.escape(here)):
        dialler.receive(challenge)
    with pytest.raises(AuthenticationError, match=re.escape(there)):
        listener.receive(dialler.refusal)


def test_an_agent_that_encrypts_takes_no_other_connection() -> None:
    dialler, listener = _agent("a", 1).dial(b"", 0, 2), _encrypted("b", 2).answer()
    with pytest.raises(AuthenticationError, match="node 'a' does not use TLS, this agent does"):
        _talk(dialler, listener)
    with pytest.raises(AuthenticationError, match="the peer uses TLS, this agent does not"):
        dialler.receive(listener.refusal)


@pytest.mark.parametrize("length", [0, 66, 322, 512, 65535])
def test_a_message_of_a_wrong_length_is_refused_by_its_header(length: int) -> None:
    listener = _agent("b", 2).answer()
    with pytest.raises(ProtocolError, match=f"with {length} bytes"):
        listener.receive(b"\xa7allred\n\x01" + length.to_bytes(2, "little"))
    assert listener.refusal == b""


def test_messages_out_of_their_order_are_refused() -> None:
    messages = _talk(_agent("a", 1).dial(b"", 0, 2), _agent("b", 2).answer())
    for message in messages[1:]:
        with pytest.raises(ProtocolError, match="not allowed here"):
            _agent("b", 2).answer().receive(message)
    for message in (messages[0], messages[2], messages[3]):
        with pytest.raises(ProtocolError, match="not allowed here"):
            _agent("a", 1).dial(b"", 0, 2).receive(message)


def test_a_name_that_is_no_text_is_refused() -> None:
    hello = _agent("name", 1).dial(b"", 0, 2).start()
    with pytest.raises(ProtocolError, match="UTF-8"):
        _agent("b", 2).answer().receive(hello.replace(b"name", b"\xff\xfe\xfd\xfc"))


def test_errors_are_of_the_tree() -> None:
    assert issubclass(ConnectedToSelf, ProtocolError)
    assert issubclass(ConnectedToSelf, AllReducedError)
