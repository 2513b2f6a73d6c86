"""Verbs without a device: queue pairs of one process that copy bytes as hardware would, one request per loop turn.

A fabric is what all devices of a test hang on. It refuses what hardware refuses (memory that is not registered for
that, receive queues that are empty, queues that are full), counts what is open, and lets a test break things.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from allreduced.transports.rdma.verbs_port import (
    AsyncKind,
    AsyncNews,
    Completion,
    CompletionKind,
    CompletionQueue,
    DeviceInfo,
    GidEntry,
    PathTo,
    PortInfo,
    ReceiveRequest,
    SendKind,
    SendRequest,
    VerbsError,
)

RETRIES = "no acknowledgement of the peer after all retries"
REFUSED = "the peer refuses access to its memory"
PROTECTION = "local protection error: the memory is not registered for that"
NOT_READY = "the peer had no receive request after all retries"
FLUSHED = "flushed"


def gid_of(host: str) -> bytes:
    """Return the GID of an IP address, as RoCE v2 has it."""
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def device_info(name: str, *hosts: str, mtu: int = 4096) -> DeviceInfo:
    """Return a device with one active Ethernet port and a GID per address."""
    gids = tuple(GidEntry(index, gid_of(host), "roce_v2", "eth0") for index, host in enumerate(hosts))
    port = PortInfo(1, "active", "ethernet", mtu, 1 << 30, 0, gids)
    return DeviceInfo(name, (port,), 1000, 1000, 10_000, 10_000, 1 << 40)


class FakeFabric:
    """Everything that the fake devices of a test share."""

    def __init__(self, *devices: DeviceInfo) -> None:
        self.devices = {device.name: device for device in devices or (device_info("fake0", "127.0.0.1", "::1"),)}
        self.pairs: dict[int, FakePair] = {}
        self.contexts: list[FakeDevice] = []
        self.open: dict[str, int] = {}
        """How many things of each kind are open."""
        self.numbers = itertools.count(17)
        self.keys = itertools.count(1001, 7)
        self.before: Callable[[FakePair, SendRequest], str] = lambda pair, request: ""
        """Called before each request of a send queue is carried out; a text makes it fail with that error."""
        self.max_registration = 1 << 50
        """Bytes of a region at most, as a limit for locked memory would have it."""
        self.down: set[tuple[str, int]] = set()
        """Ports that are."""
        self.unreachable: set[bytes] = set()
        """GIDs that no queue pair can be connected to."""
        self.unreachable_errno = errno.ETIMEDOUT
        self.connecting = 0
        """How often it was tried to connect one."""
        self.held = False
        """While true no request is carried out."""
        self.max_depth = 1 << 20
        self.most_queued = 0
        self.receive_queue_low = 1 << 20
        """The fewest receive requests that any queue had when one was used up."""

    def count(self, kind: str, change: int) -> None:
        """Note that something was opened or closed."""
        self.open[kind] = self.open.get(kind, 0) + change

    def leaks(self) -> dict[str, int]:
        """Return what is still open."""
        return {kind: number for kind, number in self.open.items() if number}

    def release(self) -> None:
        """Carry out what was held."""
        self.held = False
        for pair in list(self.pairs.values()):
            pair.kick()

    def remove(self, name: str, *, silently: bool = False) -> None:
        """Take a device away, as hot removal does; ``silently``: by a driver that waits until programs let go."""
        del self.devices[name]
        if not silently:
            self._tell(name, AsyncNews(AsyncKind.DEVICE_GONE, "the device failed or was removed"))

    def port_down(self, name: str, port: int = 1) -> None:
        """Take a port of a device down."""
        self.down.add((name, port))
        self._tell(name, AsyncNews(AsyncKind.PORT_DOWN, "the port went down"))

    def fail(self, kind: AsyncKind, name: str = "fake0") -> None:
        """Send another asynchronous event."""
        self._tell(name, AsyncNews(kind, f"news {kind.name}"))

    def _tell(self, name: str, news: AsyncNews) -> None:
        for context in self.contexts:
            if context.name == name:
                context.tell(news)


class FakeVerbs:
    """Implements ``verbs_port.Verbs`` for one machine on the fabric."""

    def __init__(self, fabric: FakeFabric, *names: str) -> None:
        self._fabric = fabric
        self._names = names

    def devices(self) -> Sequence[DeviceInfo]:
        names = self._names or self._fabric.devices
        return [self._fabric.devices[name] for name in names if name in self._fabric.devices]

    def open(self, name: str) -> FakeDevice:
        if name not in self._fabric.devices:
            raise VerbsError(f"there is no device {name}", errno.ENODEV)
        return FakeDevice(self._fabric, name)


class _Opened:
    """Something that is counted, closed once, and only after what depends on it."""

    kind = ""

    def __init__(self, fabric: FakeFabric, parents: Sequence[_Opened] = ()) -> None:
        self.fabric = fabric
        self.closed = False
        self.children = 0
        self._parents = parents
        for parent in parents:
            parent.children += 1
        fabric.count(self.kind, 1)

    def close(self) -> None:
        if self.closed:
            return
        if self.children:
            raise VerbsError(f"{self.children} things depend on this {self.kind}", errno.EBUSY)
        self.closed = True
        for parent in self._parents:
            parent.children -= 1
        self.fabric.count(self.kind, -1)


class _Bell:
    """A descriptor that is readable while something waits."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def take(self) -> None:
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


class FakeDevice(_Opened):
    """An open device."""

    kind = "device"

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        super().__init__(fabric)
        self.name = name
        self._bell = _Bell()
        self.descriptor = self._bell.descriptor
        self._news: deque[AsyncNews] = deque()
        fabric.contexts.append(self)

    def tell(self, news: AsyncNews) -> None:
        self._news.append(news)
        self._bell.ring()

    def is_active(self, port: int) -> bool:
        return (self.name, port) not in self.fabric.down

    def take_news(self) -> AsyncNews:
        self._bell.take()
        return self._news.popleft()

    def is_removed(self) -> bool:
        return self.name not in self.fabric.devices

    def create_domain(self) -> FakeDomain:
        return FakeDomain(self)

    def create_queue(self, depth: int) -> FakeQueue:
        return FakeQueue(self, depth)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.fabric.contexts.remove(self)
            self._bell.close()


class FakeRegion(_Opened):
    """A registered memory region."""

    kind = "region"

    def __init__(self, domain: FakeDomain, address: int, length: int, *, local_write: bool, remote_write: bool) -> None:
        super().__init__(domain.fabric, (domain,))
        self.domain = domain
        self.address = address
        self.length = length
        self.local_write = local_write
        self.remote_write = remote_write
        self.local_key = self.remote_key = next(domain.fabric.keys)
        domain.regions[self.local_key] = self

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def close(self) -> None:
        super().close()
        self.domain.regions.pop(self.local_key, None)


class FakeDomain(_Opened):
    """A protection domain."""

    kind = "domain"

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.fabric, (device,))
        self.device = device
        self.regions: dict[int, FakeRegion] = {}

    def register(self, address: int, length: int, *, local_write: bool, remote_write: bool) -> FakeRegion:
        if length > self.fabric.max_registration:
            raise VerbsError(f"cannot register {length} bytes: Cannot allocate memory", errno.ENOMEM)
        return FakeRegion(self, address, length, local_write=local_write, remote_write=remote_write)

    def create_pair(
        self,
        sends: CompletionQueue,
        receives: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int,
        max_inline: int,
        port: int,
    ) -> FakePair:
        assert isinstance(sends, FakeQueue)
        assert isinstance(receives, FakeQueue)
        if max(send_depth, receive_depth) > self.fabric.max_depth:
            raise VerbsError("cannot make a queue pair: Invalid argument", errno.EINVAL)
        return FakePair(self, sends, receives, send_depth, receive_depth, min(max_inline, 64))


@dataclass
class _Entry:
    completion: Completion
    frees: int = 0
    pair: FakePair | None = None


class FakeQueue(_Opened):
    """A completion queue with a channel."""

    kind = "queue"

    def __init__(self, device: FakeDevice, depth: int) -> None:
        super().__init__(device.fabric, (device,))
        self._depth = depth
        self._bell = _Bell()
        self.descriptor = self._bell.descriptor
        self._entries: deque[_Entry] = deque()
        self._armed = ""
        self._stalled = False

    def push(self, entry: _Entry, *, solicited: bool) -> None:
        self._entries.append(entry)
        assert len(self._entries) <= self._depth, "a completion queue was overrun"
        if self._armed == "any" or (self._armed and (solicited or entry.completion.error)):
            self._armed = ""
            self._bell.ring()

    def stall(self, *, stalled: bool) -> None:
        """Show nothing for a while, as to a process that does not run."""
        self._stalled = stalled
        if not stalled:
            self._bell.ring()

    def arm(self, *, solicited_only: bool = False) -> None:
        self._armed = "solicited" if solicited_only and self._armed != "any" else "any"

    def take_event(self) -> None:
        self._bell.take()

    def poll(self, most: int) -> list[Completion]:
        found: list[Completion] = []
        while self._entries and len(found) < most and not self._stalled:
            entry = self._entries.popleft()
            if entry.pair is not None:
                entry.pair.queued -= entry.frees
            found.append(entry.completion)
        return found

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._bell.close()


@dataclass
class _Sending:
    request: SendRequest
    inline: bytes = field(default=b"", repr=False)


class FakePair(_Opened):
    """A reliable connected queue pair."""

    kind = "pair"

    def __init__(
        self,
        domain: FakeDomain,
        sends: FakeQueue,
        receives: FakeQueue,
        send_depth: int,
        receive_depth: int,
        max_inline: int,
    ) -> None:
        super().__init__(domain.fabric, (domain, sends, receives))
        self.domain = domain
        self.number = next(domain.fabric.numbers)
        self.max_inline = max_inline
        self.state = "init"
        self.queued = 0
        self.refuses = False
        """Whether its queues take nothing any more."""
        self.chains: list[list[SendRequest]] = []
        """What was posted to the send queue, chain by chain."""
        self.path: PathTo | None = None
        self._sends, self.receives = sends, receives
        self._send_depth, self._receive_depth = send_depth, receive_depth
        self._out: deque[_Sending] = deque()
        self._in: deque[ReceiveRequest] = deque()
        self._unsignalled = 0
        self._scheduled = False
        domain.fabric.pairs[self.number] = self

    def connect(self, path: PathTo) -> None:
        self.fabric.connecting += 1
        if path.remote_gid in self.fabric.unreachable:
            number = self.fabric.unreachable_errno
            raise VerbsError(f"cannot connect a queue pair: {os.strerror(number)}", number)
        self.path = path
        self.state = "ready"

    def post_receive(self, requests: Sequence[ReceiveRequest]) -> None:
        if self.refuses:
            raise VerbsError("cannot post a receive request: Cannot allocate memory", errno.ENOMEM)
        for request in requests:
            if len(self._in) >= self._receive_depth:
                raise VerbsError("cannot post a receive request: Cannot allocate memory", errno.ENOMEM)
            region = self.domain.regions.get(request.key)
            assert region is not None
            assert region.local_write
            assert region.covers(request.address, request.length)
            self._in.append(request)
            if self.state == "error":
                self._flush()

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        if self.state == "init":
            raise VerbsError("cannot post a send request: Invalid argument", errno.EINVAL)
        if self.refuses:
            raise VerbsError("cannot post a send request: Cannot allocate memory", errno.ENOMEM)
        self.chains.append(list(map(replace, requests)))
        for request in requests:
            if self.queued >= self._send_depth:
                raise VerbsError("cannot post a send request: Cannot allocate memory", errno.ENOMEM)
            self.queued += 1
            self.fabric.most_queued = max(self.fabric.most_queued, self.queued)
            inline = b""
            if request.inline:
                assert request.length <= self.max_inline
                inline = ctypes.string_at(request.address, request.length)
            self._out.append(_Sending(replace(request), inline))
        self.kick()

    def kick(self) -> None:
        """Carry on with the send queue, from the loop."""
        if not self._scheduled and self._out:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def fail(self, error: str = "fatal error of the device") -> None:
        """Fail as with the oldest request of the send queue."""
        if self._out:
            self._error(self._out.popleft().request, error)
        else:
            self.state = "error"
            self._flush()

    def peer(self) -> FakePair | None:
        """Return the pair at the other end, where that is connected."""
        if self.path is None:
            return None
        other = self.fabric.pairs.get(self.path.remote_pair)
        return other if other is not None and other.state == "ready" else None

    def close(self) -> None:
        super().close()
        self.state = "closed"
        self._out.clear()
        self._in.clear()
        self.fabric.pairs.pop(self.number, None)

    def _step(self) -> None:
        self._scheduled = False
        if not self._out or self.state != "ready" or self.fabric.held:
            return
        sending = self._out.popleft()
        request = sending.request
        error = self.fabric.before(self, request)
        if self.state != "ready":
            return  # the test broke it meanwhile
        error = error or self._carry_out(sending)
        if error:
            self._error(request, error)
            return
        self._unsignalled += 1
        if request.signalled:
            self._complete(Completion(request.identifier, CompletionKind.SENT, self.number))
        self.kick()

    def _carry_out(self, sending: _Sending) -> str:
        request = sending.request
        peer = self.peer()
        if peer is None:
            return RETRIES
        if not request.inline:
            region = self.domain.regions.get(request.key)
            if region is None or not region.covers(request.address, request.length):
                return PROTECTION
        if not peer._in:
            return NOT_READY
        receive = peer._in[0]
        self.fabric.receive_queue_low = min(self.fabric.receive_queue_low, len(peer._in) - 1)
        if request.kind is SendKind.SEND:
            if request.length > receive.length:
                return "the peer calls the request invalid"
            self._copy(sending, receive.address)
            completion = Completion(receive.identifier, CompletionKind.RECEIVED, peer.number, request.length)
        else:
            target = peer.domain.regions.get(request.remote_key)
            if target is None or not target.remote_write or not target.covers(request.remote_address, request.length):
                peer.state = "error"
                peer._flush()
                return REFUSED
            self._copy(sending, request.remote_address)
            completion = Completion(
                receive.identifier, CompletionKind.WRITTEN, peer.number, request.length, request.immediate
            )
        peer._in.popleft()
        peer.receives.push(_Entry(completion), solicited=request.solicited)
        return ""

    def _copy(self, sending: _Sending, target: int) -> None:
        if sending.request.inline:
            ctypes.memmove(target, sending.inline, len(sending.inline))
        else:
            ctypes.memmove(target, sending.request.address, sending.request.length)

    def _complete(self, completion: Completion) -> None:
        frees, self._unsignalled = self._unsignalled, 0
        self._sends.push(_Entry(completion, frees, self), solicited=False)

    def _error(self, request: SendRequest, error: str) -> None:
        self.state = "error"
        self._unsignalled += 1
        self._complete(Completion(request.identifier, CompletionKind.SENT, self.number, error=error))
        self._flush()

    def _flush(self) -> None:
        while self._out:
            self._unsignalled += 1
            identifier = self._out.popleft().request.identifier
            self._complete(Completion(identifier, CompletionKind.SENT, self.number, error=FLUSHED, flushed=True))
        while self._in:
            identifier = self._in.popleft().identifier
            flushed = Completion(identifier, CompletionKind.RECEIVED, self.number, error=FLUSHED, flushed=True)
            self.receives.push(_Entry(flushed), solicited=True)
