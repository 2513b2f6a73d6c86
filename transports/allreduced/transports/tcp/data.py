"""One data flow of a TCP link: takes the next frame when it is free, receives into the posted memory."""

from __future__ import annotations

from typing import Final

from allreduced.core.errors import ProtocolError
from allreduced.transports.base import MAX_FRAME
from allreduced.transports.outbox import Outgoing, OutgoingFrame
from allreduced.transports.postings import Posting
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.owner import FlowOwner
from allreduced.transports.tcp.stream import Stream

BYTES_PER_WAKE: Final = 2 << 20
FRAMES_PER_WAKE: Final = 16
"""How much one flow moves before the loop gets to others."""

_DROP: Final = 64 << 10
_NOTHING: Final = memoryview(b"")


class DataFlow:
    """Reads and writes data frames on one connection. Its link owns it and is told of frames and failures."""

    def __init__(self, link: FlowOwner, stream: Stream) -> None:
        self._link = link
        self._loop = link.loop
        self._stream = stream
        self._open = True
        # Reading. `_into` is where the next bytes go: header, posted memory or the drop buffer.
        self._header = bytearray(wire.DATA_HEADER)
        self._into = memoryview(self._header)
        self._in_payload = False
        self._posting: Posting | None = None
        self._length = self._offset = self._tag = 0
        self._to_drop = 0
        """Bytes of this frame that go to the drop buffer behind the present ``_into``."""
        self._drop_buffer = bytearray()
        self._peer_ended = False
        # Writing
        self._frame: OutgoingFrame | None = None
        self._head = self._body = _NOTHING
        self._end_queued = False
        self._scheduled = False
        self._writing = False

    @property
    def end_sent(self) -> bool:
        """True once the end of this flow was given to the kernel."""
        return self._end_queued and not self._head and not self._stream.unsent

    def start(self) -> None:
        """Begin to read."""
        self._loop.add_reader(self._stream.fd, self._readable)
        if self._stream.buffered:
            self._loop.call_soon(self._readable)

    def wake(self) -> bool:
        """Take frames soon, if this flow is free; return whether it was."""
        if not self._open or self._scheduled or self._writing:
            return False
        self._scheduled = True
        self._loop.call_soon(self._writable)
        return True

    def redirect(self, posting: Posting) -> None:
        """Receive the rest of a frame into the drop buffer where it was meant for this posting."""
        if self._posting is posting:
            self._drop(len(self._into))
            self._link.dropped(posting)

    def detach(self, outgoing: Outgoing) -> None:
        """Send the rest of a frame from a private copy where it belongs to this send."""
        if self._frame is not None and self._frame.outgoing is outgoing:
            self._body = memoryview(bytes(self._body))
            self._frame.outgoing = None
            self._frame.payload.release()

    def stop(self, *, reset: bool) -> None:
        """Close the socket at once and hold no memory any more."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._stream.fd)
        self._loop.remove_writer(self._stream.fd)
        self._stream.close(reset=reset)
        if self._frame is not None:
            self._frame.payload.release()
        self._frame = self._posting = None
        self._into = self._head = self._body = _NOTHING

    # Reading

    def _readable(self) -> None:
        budget, frames = BYTES_PER_WAKE, FRAMES_PER_WAKE
        while self._open and budget > 0 and frames > 0:
            into = self._into
            wanted = len(into)
            try:
                got = self._stream.recv_into(into)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._broke(error)
                return
            if not got:
                self._ended()
                return
            budget -= got
            self._link.last_received = self._loop.time()
            self._into = into[got:]
            del into  # the owner may unmap the memory in the callback
            if got < wanted:
                break  # that was all there is for now
            try:
                frames -= self._filled()
            except ProtocolError as error:
                self._link.violated(error)
                return
        else:
            if self._open and self._stream.buffered:
                self._loop.call_soon(self._readable)  # the socket does not tell of these bytes
        if self._open and self._stream.unsent:
            self._watch(writable=True)  # receiving may have to be answered, by new keys

    def _filled(self) -> int:
        """Go on after ``_into`` is full. Return how many frames that completed."""
        if not self._in_payload:
            self._begin_frame()
            return 0
        posting = self._posting
        if posting is None:
            if self._to_drop:
                self._drop(self._to_drop)
                return 0
            self._link.stats.frames_unclaimed += 1
        self._in_payload = False
        self._posting = None
        self._into = memoryview(self._header)
        if posting is not None:
            self._link.landed(posting, self._offset, self._length, self._tag)
        return 1

    def _begin_frame(self) -> None:
        link = self._link
        if self._peer_ended:
            raise ProtocolError("data behind the end of a data flow")
        kind, self._length, serial, self._offset, self._tag = wire.read_data_header(self._header, MAX_FRAME)
        if kind == wire.END:
            self._peer_ended = True
            self._into = memoryview(self._header)
            link.flow_ended()
            return
        self._in_payload = True
        posting = link.postings.find(serial)
        if posting is None:
            self._drop(self._length)
        else:
            self._into = posting.claim(self._offset, self._length)
            self._posting = posting

    def _drop(self, length: int) -> None:
        """Let the next ``length`` bytes go to the drop buffer."""
        if not self._drop_buffer:
            self._drop_buffer = bytearray(_DROP)
        self._posting = None
        self._into = memoryview(self._drop_buffer)[: min(length, _DROP)]
        self._to_drop = length - len(self._into)

    def _ended(self) -> None:
        if self._peer_ended:
            self._loop.remove_reader(self._stream.fd)
        else:
            self._link.broken("the peer ended a data flow")

    def _broke(self, error: OSError) -> None:
        if self._peer_ended and self._stream.channel is not None:
            self._ended()  # everything came, and that was authentic; only the goodbye of the encryption is missing
        else:
            self._link.broken(str(error))

    # Writing

    def _writable(self) -> None:
        self._scheduled = True  # while it runs it takes what comes, and need not be woken
        budget, frames = BYTES_PER_WAKE, FRAMES_PER_WAKE
        while self._open:
            if not self._head and not self._body and not self._next():
                self._scheduled = False
                self._rest()
                return
            if budget <= 0 or frames <= 0:
                self._scheduled = not self._writing
                if self._scheduled:
                    self._loop.call_soon(self._writable)
                return
            try:
                sent = self._stream.send((self._head, self._body) if self._head else (self._body,))
            except (BlockingIOError, InterruptedError):
                self._scheduled = False
                self._watch(writable=True)
                return
            except OSError as error:
                self._link.broken(str(error))
                return
            budget -= sent
            head = min(sent, len(self._head))
            self._head = self._head[head:]
            self._body = self._body[sent - head :]
            if not self._head and not self._body:
                frames -= 1
                self._complete()

    def _next(self) -> bool:
        """Put the next frame, or the end, into ``_head`` and ``_body``."""
        frame = self._link.outbox.take()
        if frame is not None:
            self._frame = frame
            self._head = memoryview(wire.data_header(wire.PAYLOAD, frame.length, frame.serial, frame.offset, frame.tag))
            self._body = frame.payload[:]
            self._link.frame_taken()
            return True
        if self._link.is_closing() and not self._end_queued:
            self._end_queued = True
            self._head = memoryview(wire.data_header(wire.END, 0, 0, 0, 0))
            return True
        return False

    def _rest(self) -> None:
        """Wait for frames, or for room in the kernel where it does not have everything yet."""
        try:
            flushed = self._stream.flush()
        except OSError as error:
            self._link.broken(str(error))
        else:
            self._watch(writable=not flushed)

    def _complete(self) -> None:
        self._head = self._body = _NOTHING
        frame, self._frame = self._frame, None
        if frame is not None:
            self._link.frame_sent(frame)

    def _watch(self, *, writable: bool) -> None:
        if writable and not self._writing:
            self._writing = True
            self._loop.add_writer(self._stream.fd, self._writable)
        elif not writable and self._writing:
            self._writing = False
            self._loop.remove_writer(self._stream.fd)
