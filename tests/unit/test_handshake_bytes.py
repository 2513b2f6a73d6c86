"""The handshake as recorded bytes, of version 1 and of what later versions make of it: it must still be spoken.

The proofs are computed here from the description alone, with nothing of the implementation.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import pytest

from allreduced.core.errors import AuthenticationError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Handshake

SECRET = b"secret"
MAGIC = bytes.fromhex("a7616c6c7265640a")


def _counting(first: int) -> Callable[[int], bytes]:
    """Return a source whose k-th draw is one byte, ``first + k``, over and over."""
    following = first

    def draw(nbytes: int) -> bytes:
        nonlocal following
        following += 1
        return bytes([following - 1]) * nbytes

    return draw


def _talk(dialler: Handshake, listener: Handshake) -> list[bytes]:
    hello = dialler.start()
    challenge = listener.receive(hello)
    proof = dialler.receive(challenge)
    accept = listener.receive(proof)
    assert dialler.receive(accept) == b""
    return [hello, challenge, proof, accept]


def _proof(key: bytes, role: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, role + hashlib.sha256(hello + challenge).digest(), "sha256")


def test_version_1_of_a_link_with_two_data_flows() -> None:
    a = SecretAuthenticator("a", 1, SECRET, random=_counting(0x11), highest=1)
    b = SecretAuthenticator("b", 2, SECRET, random=_counting(0x21), highest=1)

    control, held = a.dial(b"", 0, 2), b.answer()
    hello, challenge, proof, accept = _talk(control, held)
    # magic, type, length; lowest, highest, secret, flow, flows, incarnation, nonce, session, length of name, name
    assert hello == (
        MAGIC + bytes.fromhex("01 4300  0100 0100 01 0000 0200 0100000000000000") + b"\x11" * 32 + bytes(16) + b"\x01a"
    )
    # magic, type, length; version, lowest, highest, secret, incarnation, nonce, session, length of name, name
    assert challenge == (
        MAGIC + bytes.fromhex("02 4100  0100 0100 0100 01 0200000000000000") + b"\x22" * 32 + b"\x21" * 16 + b"\x01b"
    )
    key = hmac.digest(SECRET, b"allreduced control flow", "sha256")
    assert proof == MAGIC + bytes.fromhex("03 2000") + _proof(key, b"dialler", hello, challenge)
    assert proof.hex()[22:38] == "115682bd8e8ac1cc"
    assert accept == MAGIC + bytes.fromhex("04 2000") + _proof(key, b"listener", hello, challenge)
    assert accept.hex()[22:38] == "d7bd8502f0f0afb7"

    session = hmac.digest(SECRET, b"allreduced session" + hashlib.sha256(hello + challenge).digest(), "sha256")
    data, answer = a.dial(control.session, 1, 2), b.answer()
    hello, challenge, proof, accept = _talk(data, answer)
    assert hello[11:] == (
        bytes.fromhex("0100 0100 01 0100 0200 0100000000000000") + b"\x12" * 32 + b"\x21" * 16 + b"\x01a"
    )
    assert proof[11:] == _proof(session, b"dialler", hello, challenge)
    assert accept[11:] == _proof(session, b"listener", hello, challenge)
    assert held.finished


def test_version_1_of_a_refusal() -> None:
    a, b = SecretAuthenticator("a", 1, highest=1), SecretAuthenticator("b", 2, SECRET, highest=1)
    listener = b.answer()
    with pytest.raises(AuthenticationError):
        listener.receive(a.dial(b"", 0, 2).start())
    # magic, type, length; reason 2 (only the listener has a secret), lowest, highest
    assert listener.refusal == MAGIC + bytes.fromhex("05 0500  02 0100 0100")


@pytest.mark.parametrize(
    ("dialler", "listener", "spoken"), [(2, 2, "0200"), (2, 1, "0100"), (1, 2, "0100")], ids=["2-2", "2-1", "1-2"]
)
def test_version_2_differs_in_its_number_only_and_speaks_version_1_with_agents_that_have_no_other(
    dialler: int, listener: int, spoken: str
) -> None:
    a = SecretAuthenticator("a", 1, SECRET, random=_counting(0x11), highest=dialler)
    b = SecretAuthenticator("b", 2, SECRET, random=_counting(0x21), highest=listener)
    here, there = a.dial(b"", 0, 2), b.answer()
    hello, challenge, _, _ = _talk(here, there)
    assert hello[11:15] == bytes.fromhex(f"0100 0{dialler}00")
    assert challenge[11:17] == bytes.fromhex(f"{spoken} 0100 0{listener}00")
    assert here.version == there.version == min(dialler, listener)
    assert SecretAuthenticator("c", 3).dial(b"", 0, 1).start()[11:15] == bytes.fromhex("0100 0200")
