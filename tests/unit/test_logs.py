"""The log: fields of a line, its three forms, how many lines there are, and that all of the code keeps to them."""

from __future__ import annotations

import ast
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from allreduced.core.errors import DeadlineExceeded, MismatchError
from allreduced.core.identity import GroupKey, Member
from allreduced.core.log_limit import DROPPED, KindLimit, LogLimit, event_of
from allreduced.daemon import logs
from allreduced.daemon.chronicle import Chronicle
from allreduced.daemon.engine import events
from allreduced.daemon.log.fields import MAX_VALUE, fields_of, pairs_of, quoted
from allreduced.daemon.log.formats import JsonFormatter, TextFormatter
from allreduced.daemon.log.handler import LineHandler
from allreduced.daemon.log.journal import Journal, JournalEntries, datagram, is_on_journal, priority_of
from allreduced.daemon.log.limit import LineLimit
from allreduced.protocol.change import Change, Loss
from allreduced.protocol.peer import Fingerprint

ROOT = Path(__file__).parents[2]
OF_OPERATIONS = {"uid", "job", "group", "name", "generation"}
OF_GROUPS = OF_OPERATIONS - {"name"}
RESERVED = {"time", "level", "node", "logger", "traceback", "message", "left_out"}
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def record(text: str, *args: object, level: int = logging.WARNING, name: str = "allreduced.test") -> logging.LogRecord:
    return logging.LogRecord(name, level, "file.py", 7, text, args, None, "function")


def calls() -> Iterator[tuple[str, ast.Call, int]]:
    """Yield every call of a logger in the code: its place, the call, and where its text is among the arguments."""
    for root in ("core", "transports", "client", "daemon"):
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr in METHODS and owner.rsplit(".", 1)[-1].lstrip("_") in ("log", "logger", "drops"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node, int(node.func.attr == "log")


def test_every_line_of_the_code_is_one_event_and_pairs() -> None:
    found: dict[str, set[str]] = {}
    for place, call, at in calls():
        text = call.args[at]
        if place.startswith("core/allreduced/core/log_limit.py"):
            continue
        assert isinstance(text, ast.Constant), f"{place}: the text must be a constant"
        pairs = pairs_of(str(text.value))
        assert pairs is not None, f"{place}: {text.value!r} is not event=word and key=%s pairs"
        keys = [key for key, _ in pairs]
        assert len(set(keys)) == len(keys), place
        assert not RESERVED & set(keys), f"{place}: {RESERVED & set(keys)} have a meaning of their own"
        conversions = sum(how.startswith("%") for _, how in pairs)
        if not any(isinstance(argument, ast.Starred) for argument in call.args):
            assert len(call.args) - at - 1 == conversions, place
        found.setdefault(pairs[0][1], set()).update(keys)
        if pairs[0][1].startswith("operation_"):
            assert set(keys) >= OF_OPERATIONS, place
        if pairs[0][1].startswith("group_"):
            assert set(keys) >= OF_GROUPS, place
    assert {"operation_failed", "group_started", "peer_lost", "client_refused", "ready"} <= set(found)


def test_fields_keep_their_types() -> None:
    fields = fields_of(record("event=x a=%s b=%d c=%.1f d=%r e=word f=%s g=%s", "t", 2, 3.25, "q r", None, True))
    assert [(field.key, field.value) for field in fields] == [
        ("event", "x"),
        ("a", "t"),
        ("b", 2),
        ("c", 3.2),
        ("d", "q r"),
        ("e", "word"),
        ("f", "None"),
        ("g", True),
    ]


def test_what_others_chose_cannot_look_like_fields_or_lines() -> None:
    line = TextFormatter("n0").format(record("event=x job=%s reason=%r", "a event=y\n2026 INFO", "it's"))
    assert line.endswith(""" allreduced.test event=x job='a event=y\\n2026 INFO' reason="it's\"""")
    assert "\n" not in line
    assert TextFormatter("n").format(record("event=x a=%s b=%s", "", "plain-1")).endswith("event=x a='' b=plain-1")


@pytest.mark.parametrize("value", ["x=y", "a b", "it's", 'a"b', "a\\b", "a\nb", "a\x1bb", "a\x85b", "a\u2028b", ""])
def test_what_is_not_one_plain_word_is_quoted(value: str) -> None:
    assert quoted(value) == repr(value)


def test_plain_words_are_not_quoted() -> None:
    for value in ("x", "tcp://10.0.0.2:4123", "é", "a,b", "100%"):
        assert quoted(value) == value


def test_long_values_are_cut() -> None:
    (_, field) = fields_of(record("event=x a=%s", "y" * (MAX_VALUE + 1)))
    assert field.value == "y" * MAX_VALUE + f"… ({MAX_VALUE + 1} characters)"


def test_lines_of_others_are_messages() -> None:
    found = fields_of(record("Executing %s took %.1f s", "a", 1.0))
    assert [(field.key, field.value) for field in found] == [
        ("event", "message"),
        ("message", "Executing a took 1.0 s"),
    ]


def test_a_line_whose_arguments_do_not_fit_is_a_message() -> None:
    found = fields_of(record("event=x a=%d"))  # no arguments: nothing is put into the text
    assert [(field.key, field.value) for field in found] == [("event", "message"), ("message", "event=x a=%d")]


def test_a_line_for_people() -> None:
    line = TextFormatter("node 1%s").format(record("event=peer_lost peer=%s proven=%s", "b", False))
    head, _, rest = line.partition(" WARNING ")
    assert rest == "node='node 1%s' allreduced.test event=peer_lost peer=b proven=False"
    assert len(head) == len("2026-11-29T21:56:47.123")


def test_a_line_of_json() -> None:
    made = record("event=peer_lost peer=%s seconds=%.2f", "é\n", 1.5)
    made.created = 1_700_000_000.25
    text = JsonFormatter("n0").format(made)
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "node": "n0",
        "logger": "allreduced.test",
        "event": "peer_lost",
        "peer": "é\n",
        "seconds": 1.5,
    }


def test_tracebacks_are_lines_for_people_and_one_key_of_json() -> None:
    made = record("event=defect")
    try:
        raise ValueError("here")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert TextFormatter("n").format(made).endswith("ValueError: here")
    assert json.loads(JsonFormatter("n").format(made))["traceback"].endswith("ValueError: here")


def test_each_event_has_lines_of_its_own_and_the_next_one_tells_how_many_were_left_out() -> None:
    now = 0.0
    limit = LineLimit(logging.INFO, lines=2, period=60, clock=lambda: now)
    passed = [limit.filter(record("event=flood")) for _ in range(5)]
    assert passed == [True, True, False, False, False]
    assert limit.filter(record("event=other"))
    now = 60.0
    after = record("event=flood a=%d", 1)
    assert limit.filter(after)
    assert TextFormatter("n").format(after).endswith("event=flood a=1 left_out=3")
    assert json.loads(JsonFormatter("n").format(after))["left_out"] == 3
    assert limit.lines == {(logging.WARNING, "flood"): 6, (logging.WARNING, "other"): 1}
    assert limit.dropped == {(logging.WARNING, "flood"): 3}
    assert not limit.filter(record("event=flood", level=logging.DEBUG))


def test_lines_for_debugging_are_neither_limited_nor_counted() -> None:
    limit = LineLimit(logging.DEBUG, lines=1, clock=lambda: 0.0)
    assert [limit.filter(record("event=flood", level=logging.DEBUG)) for _ in range(3)] == [True] * 3
    assert (limit.lines, limit.dropped) == ({}, {})


def test_lines_below_the_level_are_counted_and_not_written() -> None:
    limit = LineLimit(logging.ERROR)
    assert not limit.filter(record("event=x"))
    assert limit.lines == {(logging.WARNING, "x"): 1}
    assert limit.dropped == {}


def test_kinds_are_limited_each_by_itself_and_bounded() -> None:
    limit = KindLimit(1, 10.0, lambda: 0.0)
    assert [limit.take(kind) for kind in ("a", "b", "a")] == [0, 0, -1]
    for number in range(300):
        limit.take(f"k{number}")
    assert limit.take("a") == 0  # forgotten long since
    assert event_of("event=peer_lost node=%s") == "peer_lost"
    assert event_of("no event=x") == ""


def test_what_a_log_limit_leaves_out_is_counted_for_the_process() -> None:
    before = DROPPED[logging.WARNING, "test_flood"]
    limit = LogLimit(logging.getLogger("allreduced.test"), lines=1)
    for _ in range(4):
        limit.warning("event=test_flood")
    limit.warning("event=test_other")
    assert DROPPED[logging.WARNING, "test_flood"] - before == 3


def test_the_level_can_be_changed_while_it_runs(root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("allreduced.test_level")
    logs.configure("error", "n0", "json", {})
    logger.warning("event=unwritten_one")
    logs.set_level("info")
    logger.info("event=written_one")
    logger.debug("event=unwritten_two")
    logs.set_level("debug")
    logger.debug("event=written_two")
    root_logger.handlers[0].flush()
    written = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert written == ["written_one", "written_two"]
    counts = {(level, event): lines for level, event, lines, _ in logs.line_counts()}
    assert counts[logging.WARNING, "unwritten_one"] == 1
    assert len(root_logger.handlers) == 1


def test_a_journal_stream_is_told_by_its_inode(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        right = f"{found.st_dev}:{found.st_ino}"
        assert is_on_journal({"JOURNAL_STREAM": right}, stream.fileno())
        assert not is_on_journal({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"}, stream.fileno())
        for text in ("", "x", "1:", ":1", "a:b"):
            assert not is_on_journal({"JOURNAL_STREAM": text}, stream.fileno())
        assert not is_on_journal({}, stream.fileno())


def test_the_native_protocol_of_the_journal() -> None:
    assert datagram([("A", "b"), ("C", "d\ne")]) == b"A=b\nC\n" + (3).to_bytes(8, "little") + b"d\ne\n"
    levels = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    assert [priority_of(level) for level in levels] == [3, 3, 4, 6, 7]


def test_the_journal_gets_each_field() -> None:
    made = record("event=operation_failed job=%s generation=%d error=%s", "j 1", 3, "a\nb")
    assert JournalEntries("n0").entry_of(made) == datagram(
        [
            ("MESSAGE", "event=operation_failed job='j 1' generation=3 error='a\\nb'"),
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "allreduced"),
            ("LOGGER", "allreduced.test"),
            ("CODE_FILE", "file.py"),
            ("CODE_LINE", "7"),
            ("CODE_FUNC", "function"),
            ("ALLREDUCED_NODE", "n0"),
            ("ALLREDUCED_EVENT", "operation_failed"),
            ("ALLREDUCED_JOB", "j 1"),
            ("ALLREDUCED_GENERATION", "3"),
            ("ALLREDUCED_ERROR", "a\nb"),
        ]
    )


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("text", "event=operation_failed job='j 1'"),
        ("json", {"level": "warning", "node": "n0", "event": "operation_failed", "job": "j 1"}),
    ],
)
def test_both_formats_go_to_the_journal_with_fields(
    tmp_path: Path,
    root_logger: logging.Logger,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    style: logs.Format,
    message: object,
) -> None:
    path = str(tmp_path / "journal")
    stderr = os.fstat(2)
    monkeypatch.setattr(logs, "Journal", partial(Journal, path=path))
    logs.configure("info", "n0", style, {"JOURNAL_STREAM": f"{stderr.st_dev}:{stderr.st_ino}"})
    (handler,) = root_logger.handlers
    assert isinstance(handler, LineHandler)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        handler.emit(record("event=operation_failed job=%s", "j 1"))
        fields = dict(line.split("=", 1) for line in journal.recv(65536).decode().splitlines())
    assert (fields["PRIORITY"], fields["ALLREDUCED_JOB"]) == ("4", "j 1")
    if isinstance(message, dict):
        told = json.loads(fields["MESSAGE"])
        assert {key: told[key] for key in message} == message
    else:
        assert fields["MESSAGE"] == message
    handler.emit(record("event=operation_failed job=%s", "j 2"))  # nobody is there any more
    handler.flush()
    written = capfd.readouterr().err
    assert ('"job": "j 2"' if style == "json" else " event=operation_failed job='j 2'\n") in written
    assert logs.lost_lines() == 0


def test_lines_about_groups_and_operations_say_which(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "allreduced.groups")
    chronicle = Chronicle()
    members = (Member("a", 1, (0, 1)), Member("b", 1, (2, 3)))
    chronicle.told(events.GroupStarted(9, GroupKey(7, "j 1", "world"), 1, 1 << 20, members, 0, {0: 5, 1: 6}))
    call = events.Submitted(5, 1, 9, 0, "w", Fingerprint("all_reduce", 1, 1, "", 1, -1, ""), None, 1e9, 0)
    mismatch = MismatchError("they differ", field="dtype", by_rank={})
    chronicle.failed(call, mismatch)
    chronicle.failed(call, mismatch)  # the other rank of this node
    loss = Loss("b", (2, 3), True, True, ("peer_lost", "gone", "", {}))
    chronicle.told(events.Changed(9, 1, Change(2, members[:1], (loss,), False, (), (), (), 0, ())))
    late = DeadlineExceeded("too late", missing=(1,))
    chronicle.failed(call, late)
    chronicle.broken(9, late)
    chronicle.told(events.GroupForgotten(9))
    chronicle.failed(call, late)
    which, lost = "uid=7 job='j 1' group=world", "uid=0 job='' group=''"
    assert [TextFormatter("n").format(line).partition("allreduced.groups ")[2] for line in caplog.records] == [
        f"event=group_started {which} generation=1 ranks=4 nodes=2 local=2",
        f"event=operation_failed {which} name=w generation=1 kind=all_reduce rank=0 code=mismatch error='they differ'",
        f"event=group_changed {which} generation=2 ranks=2 nodes=1 lost=b ended=False",
        f"event=operation_failed {which} name=w generation=2 kind=all_reduce rank=0 code={late.code} error='too late'",
        f"event=group_broken {which} generation=2 code=deadline_exceeded error='too late'",
        f"event=group_ended {which} generation=2",
        f"event=operation_failed {lost} name=w generation=0 kind=all_reduce rank=0 code={late.code} error='too late'",
    ]
    levels = [line.levelno for line in caplog.records]
    assert levels == [logging.INFO, logging.INFO, *[logging.WARNING] * 3, logging.INFO, logging.WARNING]
