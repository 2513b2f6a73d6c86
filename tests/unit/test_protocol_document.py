"""docs/protocol.md says what the code does: types, fields, limits and example bytes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from allreduced.core import limits
from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member, Members
from allreduced.core.limits import AtMost, Between
from allreduced.core.reductions import Reduction
from allreduced.protocol import change, job_secret, local, peer, status, wire_error

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
LOCAL, PEER = TEXT.split("## 2. Agents")
RECORDS = {
    "key": GroupKey,
    "member": Member,
    "fingerprint": peer.Fingerprint,
    "grant": peer.Grant,
    "call": peer.Call,
    "loss": change.Loss,
    "result": change.Result,
    "failure": change.Failure,
    "change": change.Change,
    "agent": status.AgentReport,
    "peer": status.PeerReport,
    "reach": status.ReachReport,
    "group": status.GroupReport,
    "process": status.ProcessReport,
    "operation": status.OperationReport,
    "called": status.CallReport,
    "failed": status.FailedReport,
    "gathering": status.GatheringReport,
    "claim": status.ClaimReport,
    "hidden": status.HiddenReport,
    "unanswered": status.UnansweredReport,
}

# What the document calls the types of fields that have a limit.
WORDS = {
    "u8": limits.U8,
    "u16": limits.U16,
    "u32": limits.U32,
    "u64": limits.Id,
    "i32": limits.Priority,
    "i64": limits.Signed,
    "count": limits.Count,
    "count or -1": limits.CountOrNone,
    "rank": limits.Rank,
    "rank or -1": limits.RankOrNone,
    "size": limits.Size,
    "seconds": limits.Duration,
    "name": limits.Name,
    "word": limits.Word,
    "text": limits.Text,
    "shape": limits.ShapeText,
    "digest": job_secret.Digest,
    "data": local.Data,
    "data or nil": local.Data | None,
    "bool": bool,
    "error": wire_error.Marker,
    "array of u64": limits.Ids,
    "array of rank": limits.Ranks,
    "array of i64": peer.Stamp,
    "array of [name, array of rank]": local.Nodes,
    "array of [name, address]": peer.Peers,
    "array of member": Members,
    "array of grant": peer.Grants,
    "names": peer.Names,
    "uses": change.Uses,
    "array of call": peer.Calls,
    "array of loss": change.Losses,
    "array of result": change.Results,
    "array of failure": change.Failures,
    "array of change": change.Changes,
    "change": change.Change,
    "bytes, at most 256": peer.Token,
    "key": GroupKey,
    "fingerprint": peer.Fingerprint,
    "agent": status.AgentReport,
    "array of peer": status.Peers,
    "array of reach": status.Reaches,
    "bytes, at most 524288": peer.LoadData,
    "array of group": status.Groups,
    "array of process": status.Processes,
    "array of operation": status.Operations,
    "array of called": status.Calls,
    "array of [rank, seconds]": status.Arrivals,
    "array of failed": status.Failed,
    "array of gathering": status.Gatherings,
    "array of claim": status.Claims,
    "array of hidden": status.Hidden,
    "array of unanswered": status.Unanswered,
    "array of name": status.Nodes,
}


def _fields(cell: str) -> dict[str, object]:
    return {name: WORDS[word.strip()] for name, word in re.findall(r"`(\w+)` ([^;|]+)", cell)}


def _typed(cls: type, outside: tuple[str, ...] = ()) -> dict[str, object]:
    hints = get_type_hints(cls, include_extras=True, localns={"WireError": wire_error.Marker})
    return {name: hint for name, hint in hints.items() if name not in outside}


def _rows(text: str) -> list[tuple[int, str, str]]:
    return [
        (int(code), name, cell)
        for code, name, cell in re.findall(r"\| (\d+) \| `(\w+)`(?: \(version \d\))? \| (.*) \|", text)
    ]


def test_messages_are_documented_with_their_fields() -> None:
    rows = _rows(LOCAL)
    assert [(code, name) for code, name, _ in rows] == [(code, cls.__name__) for cls, code in local.CODES.items()]
    for (_, name, cell), cls in zip(rows, local.CODES, strict=True):
        assert list(_fields(cell).items()) == list(_typed(cls).items()), name
        assert ("carries a descriptor" in cell) == (cls in local.WITH_DESCRIPTOR)


def test_frames_are_documented_with_their_fields() -> None:
    rows = _rows(PEER)
    assert [(code, name) for code, name, _ in rows] == [(code, cls.__name__) for cls, code in peer.CODES.items()]
    for (_, name, cell), cls in zip(rows, peer.CODES, strict=True):
        assert list(_fields(cell).items()) == list(_typed(cls, ("group", "generation")).items()), name


def test_frames_that_older_agents_do_not_know_are_marked() -> None:
    marked = {name: int(version) for name, version in re.findall(r"\| `(\w+)` \(version (\d)\) \|", PEER)}
    assert marked == {cls.__name__: version for cls, version in peer.SINCE.items()}


def test_records_are_documented_with_their_fields() -> None:
    rows = dict(re.findall(r"^\| ([a-z]+) \| (`.*) \|$", PEER, flags=re.MULTILINE))
    assert set(rows) == set(RECORDS)
    for name, cell in rows.items():
        assert list(_fields(cell).items()) == list(_typed(RECORDS[name]).items()), name


def _most(hint: object) -> int:
    limit = get_args(hint)[1]
    assert isinstance(limit, AtMost)
    return limit.length


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("name", f"{_most(limits.Name)} bytes"),
        ("word", f"{_most(limits.Word)} bytes"),
        ("text", f"{_most(limits.Text)} bytes"),
        ("shape", f"{_most(limits.ShapeText)} bytes"),
        ("data", f"{_most(local.Data)} bytes"),
        ("array of …", f"{_most(limits.Ranks)} items"),
    ],
)
def test_limits_are_documented(word: str, text: str) -> None:
    [row] = re.findall(rf"^\| {word} \|.*$", LOCAL, flags=re.MULTILINE)
    assert text in row


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    size = get_args(limits.Size)[1]
    assert isinstance(size, Between)
    assert f"{size.lowest} … {size.highest}" in LOCAL
    assert f"length of the body, 1 … {local.MAX_MESSAGE}" in LOCAL
    assert f"an address is a text of at most {peer.MAX_ADDRESS} bytes".capitalize() in PEER
    assert f"at most {peer.MAX_GRANTS} grants, {peer.MAX_CALLS} calls and {peer.MAX_PEERS} peers" in PEER
    assert f"`names` and `uses` are arrays of at most {change.MAX_FORGET} names and u64" in PEER
    assert f"at most {wire_error.MAX_DEPTH} levels" in LOCAL
    assert peer.MAX_FRAME == 1 << 20
    assert f"A report has at most {status.MAX_REPORT} bytes" in PEER
    assert f"of each group at most {status.MAX_OPERATIONS} operations" in PEER
    assert (
        f"at most {status.MAX_LISTED} peers, groups, gatherings, hidden, unanswered and reach, and {status.MAX_CALLS}"
        in PEER
    )
    assert f"There are versions {local.LOWEST_VERSION} to {local.HIGHEST_VERSION}" in LOCAL


def test_codes_of_dtypes_reductions_and_errors_are_documented() -> None:
    for dtype in DType:
        assert f"{int(dtype)} {dtype.label}" in LOCAL
    for reduction in Reduction:
        assert f"{int(reduction)} {reduction.label}" in LOCAL
    for code in _codes(AllReducedError):
        assert f"`{code}`" in LOCAL


def _codes(cls: type[AllReducedError]) -> set[str]:
    return {cls.code}.union(*map(_codes, cls.__subclasses__()))


def _examples(text: str) -> dict[str, bytes]:
    found = re.findall(r"^`(\w+)`[^\n]*:\n\n```hex\n([0-9a-f ]+)\n```$", text, flags=re.MULTILINE)
    return {name: bytes.fromhex(digits) for name, digits in found}


@pytest.mark.parametrize(("name", "data"), _examples(LOCAL).items(), ids=_examples(LOCAL))
def test_examples_of_messages_are_right(name: str, data: bytes) -> None:
    decode = local.decode_to_agent if data[4] == 0xDC or data[5] < 64 else local.decode_to_client
    message = decode(data[4:])
    assert type(message).__name__ == name
    assert local.encode(message) == data
    assert dataclasses.is_dataclass(message)


@pytest.mark.parametrize(("name", "data"), _examples(PEER).items(), ids=_examples(PEER))
def test_examples_of_frames_are_right(name: str, data: bytes) -> None:
    frame = peer.decode(data)
    assert type(frame).__name__ == name
    assert peer.encode(frame) == data


def test_there_are_examples() -> None:
    assert set(_examples(LOCAL)) == {"Hello", "Welcome", "Join", "Submit", "Done", "RequestFailed"}
    assert set(_examples(PEER)) == {"Left", "Heartbeat"}
