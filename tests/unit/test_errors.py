from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduced.core import errors
from allreduced.core.errors import AllReducedError, Fact, from_wire, to_wire
from allreduced.protocol import local, wire_error


def _classes(root: type[AllReducedError]) -> Iterator[type[AllReducedError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


RANKS: dict[str, object] = {"ranks": (0, 65535), "nodes": ("a", "b")}
FACTS: dict[str, dict[str, object]] = {
    "peer_lost": RANKS,
    "rank_lost": RANKS,
    "group_changed": {**RANKS, "diverged": True},
    "deadline_exceeded": {"missing": (3, 4)},
    "rank_claimed": {"rank": 7},
    "mismatch": {"field": "shape", "by_rank": {0: "(3, 4)", 2: "(4, 3)"}},
    "limit_exceeded": {"limit": "arenas.total"},
    "config": {"path": "agent.toml: $.engine.threads"},
}
# What has no code of its own is a base with facts, or arrives elsewhere as the error that it is a kind of.
PUBLIC = [cls for cls in _classes(AllReducedError) if "code" in vars(cls)]
every_error = pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)


def _make(cls: type[AllReducedError]) -> AllReducedError:
    return cls("what happened", hint="what to do", **FACTS.get(cls.code, {}))


def _same(error: AllReducedError, other: object) -> bool:
    return type(other) is type(error) and vars(other) == vars(error) and str(other) == str(error)


def test_codes_are_unique() -> None:
    assert len({cls.code for cls in PUBLIC}) == len(PUBLIC)


def test_the_tree_has_the_names_that_users_catch() -> None:
    names = "AgentUnavailable PeerLost RankLost DeadlineExceeded MismatchError LimitExceeded GroupChanged"
    for name in [*names.split(), "AuthenticationError", "ProtocolError", "ConfigError"]:
        assert issubclass(getattr(errors, name), AllReducedError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.InvalidArgument, ValueError)


@every_error
def test_errors_keep_their_facts(cls: type[AllReducedError]) -> None:
    error = _make(cls)
    assert error.message == "what happened"
    assert error.hint == "what to do"
    assert str(error) == "what happened (what to do)"
    for name, value in FACTS.get(cls.code, {}).items():
        assert getattr(error, name) == value


@every_error
def test_errors_survive_the_wire(cls: type[AllReducedError]) -> None:
    error = _make(cls)
    assert _same(error, from_wire(to_wire(error)))


@every_error
def test_errors_survive_messages(cls: type[AllReducedError]) -> None:
    error = _make(cls)
    message = local.decode_to_client(local.encode(local.RequestFailed(1, to_wire(error)))[4:])
    assert isinstance(message, local.RequestFailed)
    assert _same(error, from_wire(message.error))


@every_error
def test_errors_survive_pickle_and_copy(cls: type[AllReducedError]) -> None:
    error = _make(cls)
    assert _same(error, pickle.loads(pickle.dumps(error)))
    assert _same(error, copy.copy(error))


def test_an_error_of_a_later_version_is_still_an_error() -> None:
    error = from_wire(("of_tomorrow", "what happened", "", {"new": 1}))
    assert type(error) is AllReducedError
    assert str(error) == "what happened"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(data=st.data())
def test_facts_of_any_kind_make_an_error(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(PUBLIC))
    names = list(FACTS.get(cls.code, {})) or ["other"]
    facts = {name: data.draw(JSON) for name in names}
    assert isinstance(from_wire((cls.code, "m", "h", facts)), cls)


@pytest.mark.parametrize("rank", ["²", "--5", "9" * 5000, "", "-", "x", "١"])
def test_ranks_that_are_no_numbers_are_left_out(rank: str) -> None:
    error = from_wire(("mismatch", "m", "", {"field": "shape", "by_rank": {rank: "a", "3": "b"}}))
    assert isinstance(error, errors.MismatchError)
    assert error.by_rank == {3: "b"}


# What does not fit into a message


def _sent(error: AllReducedError) -> AllReducedError:
    message = local.decode_to_client(local.encode(local.Refused(to_wire(error)))[4:])
    assert isinstance(message, local.Refused)
    return from_wire(message.error)


def test_long_texts_are_cut() -> None:
    error = _sent(errors.ConfigError("é" * 5000, path="x" * 5000, hint="y" * 4096))
    assert isinstance(error, errors.ConfigError)
    assert len(error.message.encode()) <= wire_error.MAX_TEXT
    assert error.message == "é" * 2046 + "…"
    assert error.path == "x" * 4093 + "…"
    assert error.hint == "y" * 4096


def test_texts_that_are_no_utf8_are_escaped() -> None:
    assert _sent(errors.ConfigError("no file /tmp/\udc80")).message == "no file /tmp/\\udc80"


def test_all_ranks_of_the_largest_group_fit() -> None:
    error = _sent(errors.PeerLost("m", ranks=range(1 << 16)))
    assert isinstance(error, errors.PeerLost)
    assert error.ranks == tuple(range(1 << 16))


def test_facts_over_the_limit_are_left_out() -> None:
    by_rank = {rank: f"{rank} " + "x" * 1000 for rank in range(5000)}
    error = _sent(errors.MismatchError("m", field="shape", by_rank=by_rank))
    assert isinstance(error, errors.MismatchError)
    kept = len(error.by_rank)
    assert 500 < kept < 1000
    assert error.by_rank == {rank: by_rank[rank] for rank in range(kept)}


def test_facts_that_msgpack_cannot_tell_become_text() -> None:
    deep: Fact = [[[[1]]]]
    wire = wire_error.bounded(("c", "m", "h", {"big": 1 << 80, "deep": deep, "small": -1}))
    assert wire[3] == {"big": str(1 << 80), "deep": [[[None]]], "small": -1}
