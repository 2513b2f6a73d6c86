from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from allreduced.cli.output import LONGEST_LINE, Sink, Source, Streams


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for fd in (reader, writer):
            try:
                os.close(fd)
            except OSError:
                continue  # the test closed it


def written(sink: Sink, reader: int) -> bytes:
    text = b""
    while sink.pending:
        sink.pump()
        text += os.read(reader, 1 << 16)
    return text


def test_lines_get_a_prefix_and_partial_lines_wait() -> None:
    with pipe() as (reader, writer):
        sink = Sink(writer)
        source = Source(sink, b"[3] ")
        source.feed(b"one\ntw")
        source.feed(b"o\n\nthree")
        assert written(sink, reader) == b"[3] one\n[3] two\n[3] \n"
        source.end()
        assert written(sink, reader) == b"[3] three"


def test_lines_of_two_sources_are_never_mixed() -> None:
    with pipe() as (reader, writer):
        sink = Sink(writer)
        left, right = Source(sink, b"[0] "), Source(sink, b"[1] ")
        left.feed(b"abc")
        right.feed(b"xyz\n")
        left.feed(b"def\n")
        assert written(sink, reader) == b"[1] xyz\n[0] abcdef\n"


def test_a_last_line_without_newline_stays_so_unless_another_source_goes_on() -> None:
    with pipe() as (reader, writer):
        sink = Sink(writer)
        left, right = Source(sink, b""), Source(sink, b"")
        left.feed(b"first")
        left.end()
        right.feed(b"second")
        right.end()
        assert written(sink, reader) == b"first\nsecond"


def test_bytes_pass_as_they_are() -> None:
    data = bytes(byte for byte in range(256) if byte != 10) + b"\r\n"
    with pipe() as (reader, writer):
        sink = Sink(writer)
        Source(sink, b"").feed(data)
        assert written(sink, reader) == data


def test_an_endless_line_is_broken_and_not_kept() -> None:
    with pipe() as (reader, writer):
        sink = Sink(writer)
        source = Source(sink, b"> ")
        source.feed(b"a" * LONGEST_LINE)
        source.feed(b"b\n")
        assert written(sink, reader) == b"> " + b"a" * LONGEST_LINE + b"\n> b\n"


def test_a_sink_that_nobody_reads_says_so_once_and_drops() -> None:
    with pipe() as (reader, writer):
        sink = Sink(writer)
        os.close(reader)
        sink.put(b"lost\n")
        with pytest.raises(BrokenPipeError):
            sink.pump()
        sink.put(b"lost too\n")
        assert sink.closed
        assert not sink.pending


def test_sources_are_not_read_while_their_sink_is_stuck() -> None:
    with selectors.PollSelector() as selector, pipe() as (reader, writer), pipe() as (source, end):
        streams = Streams(selector, out=writer, err=writer)
        assert streams.out is streams.err
        streams.add(os.dup(source), streams.out, b"")
        os.write(end, b"early\n")
        streams.out.put(b"x" * (1 << 20) + b"\n")
        streams.arm()
        assert [key.fd for key in selector.get_map().values()] == [writer]
        assert len(written(streams.out, reader)) == (1 << 20) + 1
        streams.arm()
        for key, _ in selector.select(0):
            key.data()
        assert written(streams.out, reader) == b"early\n"
        streams.drain()


def test_what_ended_processes_left_in_their_pipes_is_taken() -> None:
    with selectors.PollSelector() as selector, pipe() as (reader, writer), pipe() as (source, end):
        streams = Streams(selector, out=writer, err=writer)
        streams.add(os.dup(source), streams.out, b"[7] ")
        os.write(end, b"last words")
        streams.drain()
        assert written(streams.out, reader) == b"[7] last words"
        streams.arm()
        assert not list(selector.get_map())
