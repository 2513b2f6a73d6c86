"""What reads bytes of somebody else, given anything: whole random bytes, changed messages, and the worst of their size.

``make fuzz`` does the same for long, see ``tests/fuzz``.
"""

from __future__ import annotations

import contextlib
import random
import time
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz import __main__ as fuzz
from tests.fuzz.__main__ import Watch, mutate
from tests.fuzz.corpus import corpus
from tests.fuzz.parsers import CODES, READERS, parse

from allreduced.core.errors import ProtocolError
from allreduced.protocol import local, peer

EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=150)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.lists(VALUES, max_size=20)
TO_AGENT = sorted(code for code in local.CODES.values() if code < 64)
TO_CLIENT = sorted(code for code in local.CODES.values() if code > 64)


def _reader(name: str) -> bytes:
    return bytes([next(at for at, reader in enumerate(READERS) if reader.__name__ == name)])


@pytest.mark.parametrize("at", range(len(READERS)), ids=[reader.__name__ for reader in READERS])
def test_kept_inputs_are_answered(at: int) -> None:
    mine = [data for data in corpus() if data[0] % len(READERS) == at]
    assert mine
    for data in mine:
        parse(data)
        for cut in range(len(data)):
            parse(data[:cut])


@EXAMPLES
@given(st.integers(0, len(READERS) - 1), st.binary(max_size=400))
def test_random_bytes_are_answered(reader: int, data: bytes) -> None:
    parse(bytes([reader]) + data)


@EXAMPLES
@given(st.sampled_from(TO_AGENT), FIELDS)
def test_messages_of_clients_with_any_fields_are_answered(code: int, fields: list[object]) -> None:
    parse(_reader("_agent_body") + msgpack.packb([code, *fields], unicode_errors="surrogatepass"))


@EXAMPLES
@given(st.sampled_from(TO_CLIENT), FIELDS)
def test_messages_of_agents_with_any_fields_are_answered(code: int, fields: list[object]) -> None:
    parse(_reader("_client_body") + msgpack.packb([code, *fields], unicode_errors="surrogatepass"))


@EXAMPLES
@given(st.integers(0, len(CODES) - 1), st.integers(0, 1), FIELDS)
def test_frames_with_any_fields_are_answered(code: int, grouped: int, fields: list[object]) -> None:
    body = msgpack.packb(fields, unicode_errors="surrogatepass")
    parse(_reader("_frame_body") + bytes([code, grouped]) + body)


def test_changed_messages_are_answered() -> None:
    rng, pool = random.Random(1), corpus()
    watch = Watch(10_000, parse)
    while watch.count < watch.inputs:
        watch(mutate(rng, pool))


def _worst_bodies() -> list[tuple[str, bytes]]:
    """Return bodies of the largest size that cost a reader the most."""
    most = local.MAX_MESSAGE
    ids = [(1 << 64) - 1] * 65536
    nested = msgpack.packb([7, *[[]] * 60, [[0] * 60000] * 30])
    return [
        ("many leases", msgpack.packb([7, ids])),
        ("leases that are none", msgpack.packb([7, [*ids[:-1], "x"]])),
        ("too many leases", msgpack.packb([7, [0] * 1_900_000])),
        ("arrays that only say that they are long", b"\x92\x07" + b"\xdd\x00\x00\xff\xff" * 400_000),
        ("nested arrays", b"\x92\x07" + b"\x91" * (most - 3) + b"\x00"),
        ("wide arrays", nested),
        ("empty maps", b"\x92\x07\xdc\xff\xff" + b"\x80" * 65535),
        ("a large map", b"\x92\x07" + msgpack.packb({str(number): number for number in range(150_000)})),
        ("texts", msgpack.packb([2, *["x" * 200] * 70])),
        ("a long text", msgpack.packb([2, 1, "\u00e9" * 900_000])),
        ("data", local.encode(local.Upload(1, bytes(local.CHUNK)))[4:]),
    ]


@pytest.mark.parametrize(("name", "body"), _worst_bodies(), ids=[name for name, _ in _worst_bodies()])
def test_the_worst_of_a_message_costs_little_memory(name: str, body: bytes) -> None:
    """And little time, which is not judged here: `python -m tests.fuzz.worst` prints it."""
    body = body[: local.MAX_MESSAGE]
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            local.decode_to_agent(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * local.MAX_MESSAGE


def test_the_watch_finds_what_it_looks_for() -> None:
    def slow(data: bytes) -> None:
        until = time.process_time() + 0.06
        while time.process_time() < until:
            pass

    with pytest.raises(TimeoutError, match="2 bytes: 6162"):
        Watch(1, slow)(b"ab")

    def broken(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        Watch(1, broken)(b"ab")
    assert peer.MAX_FRAME < local.MAX_MESSAGE


def test_a_process_that_grows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [1000]
    monkeypatch.setattr(fuzz, "_resident_mib", lambda: resident[0])
    watch = Watch(10_000, lambda data: None)
    resident[0] += 300
    for _ in range(fuzz.LOOK_EVERY - 1):
        watch(b"ab")
    with pytest.raises(MemoryError, match="grew by 300 MiB in 1000 inputs, 256 are allowed"):
        watch(b"ab")
