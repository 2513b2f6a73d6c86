"""Lines are written by a thread: in order, within bounds, and what is lost is counted and told."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.unread import full_pipe, read_rest

from allreduced.daemon.log.descriptor import Descriptor
from allreduced.daemon.log.formats import TextFormatter
from allreduced.daemon.log.handler import LineHandler
from allreduced.daemon.log.journal import Journal, datagram
from allreduced.daemon.log.stream import ErrorStream
from allreduced.daemon.log.writer import Line, LineWriter

BOUND = 60.0
LOG = "import logging, sys\nfrom allreduced.daemon import logs\nlogs.take_stderr()\nlogs.configure('info', 'n0')\n"


class Held:
    """An outlet that takes a line when it is told to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.refuses = False
        self.closed = False
        self._entered = threading.Semaphore(0)
        self._free = threading.Semaphore(0)

    def write(self, line: Line) -> None:
        self._entered.release()
        assert self._free.acquire(timeout=BOUND)
        if self.refuses:
            raise OSError(errno.ENOSPC, "full")
        self.lines.append(line.text)

    def close(self) -> None:
        self.closed = True

    def entered(self) -> None:
        """Return when a line is about to be taken."""
        assert self._entered.acquire(timeout=BOUND)

    def take(self, lines: int) -> None:
        """Take so many."""
        self._free.release(lines)


@pytest.fixture
def held() -> Held:
    return Held()


@contextlib.contextmanager
def writing(outlet: Held, most: int = 1000, patience: float = BOUND) -> Iterator[LineWriter]:
    writer = LineWriter(outlet, most=most, patience=patience)
    writer.tell = lambda lines: Line(f"lost {lines}")
    try:
        yield writer
    finally:
        outlet.take(1000)
        writer.close()


def put(writer: LineWriter, *texts: str) -> None:
    for text in texts:
        writer.put(Line(text))


def test_lines_are_written_in_order(held: Held) -> None:
    texts = [f"{number}" for number in range(100)]
    with writing(held) as writer:
        put(writer, *texts)
        held.take(len(texts))
        assert writer.finish()
        assert (held.lines, writer.lost) == (texts, 0)


def test_what_does_not_fit_is_lost_counted_and_told_in_its_place(held: Held) -> None:
    with writing(held, most=10) as writer:
        put(writer, "first")
        held.entered()  # it is being written, and still counts
        put(writer, "other", "third", "4", "5")
        held.take(1)
        held.entered()  # there is room again, but what came would stand before the number
        put(writer, "6")
        held.take(2)
        assert writer.finish()
        assert (held.lines, writer.lost) == (["first", "other", "lost 4"], 4)
        put(writer, "7")
        held.take(1)
        assert writer.finish()
        assert held.lines[3:] == ["7"]


def test_lines_that_come_while_a_loss_is_told_stand_behind_it(held: Held) -> None:
    with writing(held, most=5) as writer:
        put(writer, "first", "2")
        held.entered()
        held.take(1)
        held.entered()  # the number
        put(writer, "3")
        held.take(2)
        assert writer.finish()
        assert (held.lines, writer.lost) == (["first", "lost 1", "3"], 1)


def test_the_journals_entries_count_and_one_line_may_be_longer_than_all_that_may_wait(held: Held) -> None:
    with writing(held, most=10) as writer:
        writer.put(Line("x" * 50))
        held.entered()
        held.take(1)
        assert writer.finish()
        writer.put(Line("abc", b"abc"))
        held.entered()
        writer.put(Line("abcd", b"e"))
        held.take(2)
        assert writer.finish()
        assert (held.lines, writer.lost) == (["x" * 50, "abc", "lost 1"], 1)


def test_what_an_outlet_refuses_is_told_before_the_next_line_that_it_takes(held: Held) -> None:
    with writing(held) as writer:
        held.refuses = True
        for text in ("1", "2", "3"):  # the second and the third time it refuses the number
            put(writer, text)
            held.take(1)
            assert writer.finish()
        assert (held.lines, writer.lost) == ([], 3)
        held.refuses = False
        put(writer, "4")
        held.take(2)
        assert writer.finish()
        assert (held.lines, writer.lost) == (["lost 3", "4"], 3)


def test_losses_that_nobody_tells_yet_are_not_forgotten(held: Held) -> None:
    with writing(held, most=1) as writer:
        tell, writer.tell = writer.tell, None
        put(writer, "1", "2")
        held.take(1)
        assert writer.finish()
        writer.tell = tell
        put(writer, "3")
        held.take(2)
        assert writer.finish()
        assert held.lines == ["1", "lost 1", "3"]


def test_nothing_waits_for_a_line_longer_than_its_patience(held: Held) -> None:
    with writing(held, patience=0.01) as writer:
        put(writer, "1")
        held.entered()
        assert not writer.finish()
        writer._patience = BOUND  # it is used up: a second wait ends at once
        assert not writer.finish()
        writer.close()
        assert held.closed
        held.take(1)


def test_a_closed_writer_has_no_thread_and_a_later_line_is_written_all_the_same(held: Held) -> None:
    with writing(held) as writer:
        put(writer, "1")
        thread = writer._thread
        assert thread is not None
        assert thread.daemon
        held.take(1)
        writer.close()
        thread.join(BOUND)
        assert not thread.is_alive()
        put(writer, "2")
        held.take(1)
        assert writer.finish()
        assert held.lines == ["1", "2"]


def test_where_there_can_be_no_thread_the_end_writes_what_waits(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with writing(held, most=2) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            put(writer, "1", "2", "3")
            held.take(3)
            assert writer.finish()
        assert (held.lines, writer.lost) == (["1", "2", "lost 1"], 1)
        put(writer, "4")
        held.take(1)
        assert writer.finish()
        assert held.lines[3:] == ["4"]


def test_a_line_that_comes_while_the_thread_is_started_starts_no_other(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_and_log(thread: threading.Thread) -> None:
        started.append(thread)
        put(writer, "2")
        start(thread)

    with writing(held) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_and_log)
            put(writer, "1", "3")
        held.take(3)
        assert writer.finish()
        assert (held.lines, len(started)) == (["1", "2", "3"], 1)


def test_a_line_is_made_where_it_is_logged(held: Held) -> None:
    with writing(held) as writer:
        handler = LineHandler(writer)
        handler.setFormatter(TextFormatter("n0"))
        first, changing = logging.getLogger("allreduced.test_writer"), ["a"]
        held_up = first.makeRecord(first.name, logging.WARNING, "f.py", 1, "event=x seen=%s", (changing,), None)
        handler.handle(held_up)
        changing.append("b")
        held.take(1)
        assert writer.finish()
        assert held.lines[0].endswith(" WARNING node=n0 allreduced.test_writer event=x seen=\"['a']\"\n")


def test_the_loss_is_a_line_of_the_log_like_others(held: Held) -> None:
    with writing(held, most=1) as writer:
        handler = LineHandler(writer)
        handler.setFormatter(TextFormatter("n0"))
        put(writer, "1", "2", "3")
        held.take(2)
        assert writer.finish()
        assert held.lines[0] == "1"
        assert held.lines[1].endswith(" WARNING node=n0 allreduced.log event=log_lines_lost lines=2\n")


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads_keeps_its_lines_until_somebody_does(blocking: bool) -> None:
    reading, writing, filled = full_pipe()
    os.set_blocking(writing, blocking)  # whoever shares it may have made it so
    writer = LineWriter(Descriptor(writing, "latin-1"), patience=0.0)
    put(writer, "é\n", "ж\n")
    assert not writer.finish()
    text = os.read(reading, filled)
    while not text.endswith(b"\\u0436\n"):
        text += os.read(reading, filled)
    assert text[filled:] == b"\xe9\n\\u0436\n"
    writer._left = BOUND
    assert writer.finish()
    writer.close()
    os.close(reading)
    os.close(writing)


def test_a_line_that_was_torn_has_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    room = [3, -1, 100]

    def write(_descriptor: int, data: memoryview) -> int:
        size = room.pop(0)
        if size < 0:
            raise OSError(errno.ENOSPC, "full")
        written.append(bytes(data[:size]))
        return len(written[-1])

    monkeypatch.setattr(os, "write", write)
    outlet = Descriptor(2, "utf-8")
    with pytest.raises(OSError, match="full"):
        outlet.write(Line("first\n"))
    outlet.write(Line("second\n"))
    room.append(100)
    outlet.write(Line("third\n"))
    assert written == [b"fir", b"\nsecond\n", b"third\n"]


def test_a_journal_that_does_not_read_gets_every_line_later(tmp_path: Path) -> None:
    path, other = str(tmp_path / "journal"), Held()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        writer = LineWriter(Journal(other, path), patience=0.0)
        # Neither the socket's queue nor what a sender may have under way holds so many.
        entries = [datagram([("NUMBER", str(number))]) for number in range(2000)]
        for entry in entries:
            writer.put(Line("", entry))
        assert not writer.finish()
        journal.settimeout(BOUND)
        assert [journal.recv(100) for _ in entries] == entries
        writer._left = BOUND
        assert writer.finish()
    writer.close()
    assert (other.lines, other.closed, writer.lost) == ([], True, 0)


def test_lines_without_an_entry_and_what_the_journal_refuses_go_to_the_other_outlet(tmp_path: Path) -> None:
    path, other = str(tmp_path / "journal"), Held()
    other.take(3)
    outlet = Journal(other, path)
    outlet.write(Line("nobody is there", b"E=1\n"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        outlet.write(Line("an entry", b"E=2\n"))
        outlet.write(Line("words"))
        assert journal.recv(100) == b"E=2\n"
    outlet.close()
    outlet.write(Line("after its end", b"E=3\n"))
    assert other.lines == ["nobody is there", "words", "after its end"]


def test_what_is_said_beside_the_log_goes_out_in_whole_lines(held: Held) -> None:
    with writing(held) as writer:
        stream = ErrorStream(writer, 2, "utf-8")
        assert (stream.fileno(), stream.encoding, stream.writable(), stream.isatty()) == (
            2,
            "utf-8",
            True,
            os.isatty(2),
        )
        assert stream.write("one ") == 4
        assert stream.write("line\nand\nthe ") == 13
        stream.write("next\n")
        stream.write("the end")
        stream.flush()
        stream.flush()
        held.take(3)
        stream.finish()
        assert held.lines == ["one line\nand\n", "the next\n", "the end"]


def run(code: str, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOG + code], stdin=subprocess.DEVNULL, stderr=stderr)


DIVIDED = "ZeroDivisionError: division by zero"
SAYS = "logging.getLogger('allreduced.x').info('event=x a=%d', 1)\nprint('words', file=sys.stderr)\n"


@pytest.mark.parametrize(
    ("code", "status", "end"),
    [
        ("", 0, "words"),
        ("raise RuntimeError('a defect')", 1, "RuntimeError: a defect"),
        ("import os\nlogging.shutdown()\nos._exit(3)", 3, "words"),
        ("sys.exit('the reason')", 1, "the reason"),
        ("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()", 0, DIVIDED),
        ("class Broken:\n    def __del__(self):\n        1 / 0\nBroken()", 0, DIVIDED),
        ("import warnings\nwarnings.simplefilter('always')\nwarnings.warn('beware')", 0, "UserWarning: beware"),
    ],
)
def test_what_was_said_before_the_end_is_written(code: str, status: int, end: str) -> None:
    with run(SAYS + code, subprocess.PIPE) as process:
        _, said = process.communicate(timeout=BOUND)
    lines = said.decode().splitlines()
    assert process.returncode == status
    assert lines[0].endswith(" INFO node=n0 allreduced.x event=x a=1")
    assert lines[1] == "words"
    assert any(line.endswith(end) for line in lines[-2:]), lines  # a warning's place in the code may follow


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise RuntimeError", 1), ("logging.shutdown()", 0)])
def test_a_process_ends_though_nobody_reads_what_it_says(code: str, status: int) -> None:
    reading, writing, filled = full_pipe()
    with run(SAYS + code, writing) as process:
        os.close(writing)
        try:
            assert process.wait(BOUND) == status
        finally:
            process.kill()
    assert read_rest(reading)[filled:] == b""
