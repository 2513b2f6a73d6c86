"""Messages from templates are those of ``encode``, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allreduced.core.errors import InternalError
from allreduced.protocol.local import MAX_MESSAGE, Done, Submit, encode
from allreduced.protocol.templates import DoneTemplate, SubmitTemplate

EDGES = [0, 1, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1]
PAYLOADS = [b"", b"x", bytes(255), bytes(256), bytes(4096), bytes(65535), bytes(65536)]

CALLS = [
    Submit(0, 1, "all_reduce", "", 1, 1, "(1024,)", 1024, -1, 0, 0.0, "", None, -1, 0, False, False),
    Submit(0, 1 << 63, "broadcast", "é" * 100, 13, 0, "()", 1, 65535, -5, 2.5, "ring", None, -1, 0, False, True),
    Submit(
        0,
        1,
        "all_reduce_many",
        "n" * 256,
        15,
        11,
        "(3,);" * 100,
        1 << 40,
        -1,
        1 << 30,
        1e9,
        "",
        None,
        -1,
        0,
        False,
        False,
    ),
]


@pytest.mark.parametrize("call", CALLS)
def test_submits(call: Submit) -> None:
    template = SubmitTemplate(replace(call, request=77, payload=b"other", upload=True))
    for request in [*EDGES, (1 << 64) - 1]:
        assert template.encode(request) == encode(replace(call, request=request))
        assert template.encode(request, upload=True) == encode(replace(call, request=request, upload=True))
        wanted = replace(call, request=request, arena=request >> 1, offset=request >> 2)
        assert template.encode(request, arena=request >> 1, offset=request >> 2) == encode(wanted)
    for payload in PAYLOADS:
        assert template.encode(9, payload) == encode(replace(call, request=9, payload=payload))


@pytest.mark.parametrize("participants", [(), (0, 1, 300), tuple(range(70000 % 65536))])
@pytest.mark.parametrize("algorithm", ["direct", ""])
def test_dones(participants: tuple[int, ...], algorithm: str) -> None:
    template = DoneTemplate(participants, algorithm)
    for number in EDGES:
        for payload in [None, *PAYLOADS]:
            wanted = Done(number, payload, number, number, number, number, True, participants, algorithm, number / 7)
            assert template.encode(number, payload, number, number, number, number, True, number / 7) == encode(wanted)
    wanted = Done(1, None, -1, 0, 0, 0, False, participants, algorithm, 0.0)
    assert template.encode(1, None, -1, 0, 0, 0, False, 0.0) == encode(wanted)


def test_too_long_ones_are_refused() -> None:
    with pytest.raises(InternalError, match="at most"):
        SubmitTemplate(CALLS[0]).encode(1, bytes(MAX_MESSAGE))
