"""Runs the negotiation of a link over its authenticated control flow, and makes the link."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from allreduced.core.errors import AgentUnavailable, ConfigError, ProtocolError
from allreduced.transports.base import LinkOptions
from allreduced.transports.rdma import negotiation, wire
from allreduced.transports.rdma.dead_ends import PERIOD, DeadEnds, is_no_way
from allreduced.transports.rdma.devices import agree, choose, gid_text
from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.interfaces import port_gid
from allreduced.transports.rdma.link import RdmaLink, RemoteEnd
from allreduced.transports.rdma.negotiation import PairEnd, Side
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import (
    Completion,
    LocalPort,
    PathTo,
    SendKind,
    SendRequest,
    Verbs,
    VerbsError,
)
from allreduced.transports.tcp.conversation import Conversation, decline, declined
from allreduced.transports.tcp.dial import Opened
from allreduced.transports.tcp.link import FlowLink
from allreduced.transports.tcp.negotiator import Accepted
from allreduced.transports.tcp.stream import Stream

_PROOF_SHARE: Final = 0.25
"""Of the timeout of handshakes, for the proof of one direction."""


_LOOK_EVERY: Final = 0.5
"""Seconds between looks of a link whether its device is still there; fewer where less patience is wanted."""


class _Unfit(Exception):
    """RDMA cannot be used for this link; the message says why."""


class _Declined(_Unfit):
    """The other end said so."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the other end declined: {reason}")


class _Half:
    """This end of a link whose queue pairs are not connected yet."""

    def __init__(self, verbs: Verbs, host: str, options: LinkOptions, flows: int, dead_ends: DeadEnds) -> None:
        self.options = options
        self._dead_ends = dead_ends
        rdma = options.rdma
        try:
            self.local = choose(verbs.devices(), rdma, host, port_gid(host))
            self.endpoint = Endpoint(verbs, self.local, rdma, flows)
        except ConfigError as error:
            raise _Unfit(error.message) from error
        except VerbsError as error:
            raise _Unfit(str(error)) from error
        self.side = _side(self.local, rdma, self.endpoint)

    def connect(self, there: Side) -> int:
        """Connect all queue pairs and return the path MTU."""
        if len(there.pairs) != len(self.side.pairs):
            raise ProtocolError(f"an RDMA end with {len(there.pairs)} queue pairs, {len(self.side.pairs)} are wanted")
        rdma = self.options.rdma
        try:
            mtu = agree(self.local, rdma, layer=there.link_layer, kind=there.kind, gid=there.gid, mtu=there.mtu)
        except ConfigError as error:
            raise _Unfit(error.message) from error
        if reason := self._dead_ends.why(self.local, there.gid):
            raise _Unfit(f"{reason}; that is not tried again within {PERIOD:g} s")
        try:
            for pair, mine, theirs in zip(self.endpoint.pairs, self.side.pairs, there.pairs, strict=True):
                pair.connect(
                    PathTo(
                        self.local,
                        mtu,
                        there.gid,
                        there.lid,
                        theirs.number,
                        mine.psn,
                        theirs.psn,
                        rdma.timeout,
                        rdma.retry_count,
                        rdma.rnr_retry,
                        rdma.traffic_class,
                        rdma.service_level,
                        rdma.hop_limit,
                    )
                )
        except VerbsError as error:
            if not is_no_way(error):
                raise _Unfit(str(error)) from error
            reason = f"{gid_text(there.gid)} cannot be reached from {self.local.device}: {error}"
            self._dead_ends.remember(self.local, there.gid, reason)
            raise _Unfit(reason) from error
        return mtu

    async def prove(self, there: Side, mtu: int) -> None:
        """Send a packet of full length on each queue pair, and return when the other end has them."""
        endpoint = self.endpoint
        length = min(mtu, endpoint.out.size, wire.HEADER + there.small)
        head = wire.header(wire.PROBE)
        timeout = self.options.handshake_timeout * _PROOF_SHARE
        try:
            async with asyncio.timeout(timeout):
                for index, pair in enumerate(endpoint.pairs):
                    slot = index  # free until the link starts
                    with endpoint.out.view(slot, length) as view:
                        view[: len(head)] = head
                    pair.post_send(
                        [SendRequest(0, SendKind.SEND, endpoint.out.address(slot), length, endpoint.out.key)]
                    )
                missing = len(endpoint.pairs)
                while missing:
                    found = endpoint.sends.poll(missing) or await _next(endpoint)
                    failed = [completion.error for completion in found if completion.error]
                    if failed:
                        raise _Unfit(f"{gid_text(there.gid)} cannot be reached by RDMA: {failed[0]}")
                    missing -= len(found)
        except TimeoutError as error:
            raise _Unfit(f"{gid_text(there.gid)} did not answer by RDMA within {timeout:g} s") from error
        except VerbsError as error:
            raise _Unfit(str(error)) from error

    def remote_end(self, there: Side) -> RemoteEnd:
        """Return what the link must know of the other end."""
        return RemoteEnd(there.depth, there.small, there.tag)

    def close(self) -> None:
        """Give everything back; no link comes about."""
        self.endpoint.close()


def _side(local: LocalPort, rdma: RdmaOptions, endpoint: Endpoint) -> Side:
    pairs = tuple(PairEnd(pair.number, secrets.randbits(24)) for pair in endpoint.pairs)
    return Side(
        local.link_layer,
        local.gid.kind,
        local.gid.gid,
        local.lid,
        local.mtu,
        rdma.depth,
        rdma.small,
        secrets.randbits(64) | 1,
        pairs,
    )


def _look_every(options: LinkOptions) -> float:
    return min(_LOOK_EVERY, options.handshake_timeout / 2)  # which is well below the ``failure_timeout`` of an agent


async def _next(endpoint: Endpoint) -> list[Completion]:
    """Wait until the send queue has something, and return what it has; maybe nothing after all."""
    loop = asyncio.get_running_loop()
    queue = endpoint.sends
    queue.arm()
    found = queue.poll(len(endpoint.pairs))  # what came before it was armed causes no event
    if found:
        return found
    woken: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        queue.take_event()
        if not woken.done():
            woken.set_result(None)

    loop.add_reader(queue.descriptor, readable)
    try:
        await woken
    finally:
        loop.remove_reader(queue.descriptor)
    return queue.poll(len(endpoint.pairs))


class RdmaNegotiator:
    """Implements ``tcp.negotiator.Negotiator``, and the dialler's part.

    ``verbs``: those of this machine, or why there are none. ``required``: RDMA or no link.
    """

    def __init__(self, verbs: Callable[[], Verbs], *, required: bool) -> None:
        self._verbs = verbs
        self.required = required
        self._dead_ends = DeadEnds()

    async def answer(self, accepted: Accepted, conversation: Conversation) -> FlowLink | str:
        """Answer a dialler. Return the link, not started, or why the data goes by TCP."""
        try:
            return await self._answered(accepted, conversation)
        except _Unfit as error:
            await conversation.send(decline(str(error)))
            if self.required:
                raise ProtocolError(f"no link but by RDMA here, and {error}") from error
            return str(error)

    async def offer(self, opened: Opened, conversation: Conversation) -> FlowLink | str:
        """Ask the listener. Return the link, not started, or why the data goes by TCP.

        :raises AgentUnavailable: RDMA is required, and cannot be used.
        :raises ProtocolError: the listener answers what it must not.
        """
        try:
            return await self._offered(opened, conversation)
        except _Unfit as error:
            if not isinstance(error, _Declined):
                await conversation.send(decline(str(error)))
                await conversation.receive()  # the listener took note, and waits for data flows
            if self.required:
                raise AgentUnavailable(
                    f"no RDMA link to {opened.address}: {error}",
                    hint="set the transport to auto where TCP will do for such links",
                ) from error
            return str(error)

    async def _answered(self, accepted: Accepted, conversation: Conversation) -> RdmaLink:
        offered = negotiation.read_offer(await self._next(conversation))
        version = negotiation.common_version(offered)
        if version is None:
            raise _Unfit(f"the other end speaks RDMA negotiations {offered.lowest} to {offered.highest}")
        with self._half(accepted.stream, accepted.local_host, accepted.options, accepted.control.flows) as half:
            mtu = half.connect(offered.side)
            await conversation.send(negotiation.answer(half.side, version))
            await self._expect(conversation, negotiation.CONNECTED)
            await half.prove(offered.side, mtu)
            await conversation.send(bytes([negotiation.CONFIRMED]))
            return RdmaLink(
                accepted.control.peer,
                conversation.end(),
                half.endpoint,
                half.remote_end(offered.side),
                tag=half.side.tag,
                mtu=mtu,
                initiator=False,
                local_address=accepted.local,
                remote_address=accepted.remote,
                max_frame=accepted.options.max_frame,
                look_every=_look_every(accepted.options),
                version=accepted.control.version,
            )

    async def _offered(self, opened: Opened, conversation: Conversation) -> RdmaLink:
        with self._half(opened.stream, opened.local_host, opened.options, opened.options.flows) as half:
            await conversation.send(negotiation.offer(half.side))
            there = negotiation.read_answer(await self._next(conversation)).side
            mtu = half.connect(there)
            await half.prove(there, mtu)
            await conversation.send(bytes([negotiation.CONNECTED]))
            await self._expect(conversation, negotiation.CONFIRMED)
            return RdmaLink(
                opened.control.peer,
                conversation.end(),
                half.endpoint,
                half.remote_end(there),
                tag=half.side.tag,
                mtu=mtu,
                initiator=True,
                local_address=opened.local,
                remote_address=opened.remote,
                max_frame=opened.options.max_frame,
                look_every=_look_every(opened.options),
                version=opened.control.version,
            )

    @contextmanager
    def _half(self, stream: Stream, host: str, options: LinkOptions, flows: int) -> Iterator[_Half]:
        """Make this end. The link that is made of it owns it; where the body raises instead, all is given back."""
        if stream.channel is not None and not options.rdma.plaintext:
            raise _Unfit("mutual TLS protects this link, and data by RDMA is plain text: rdma_plaintext allows it")
        try:
            verbs = self._verbs()
        except ConfigError as error:
            raise _Unfit(error.message) from error
        half = _Half(verbs, host, options, flows, self._dead_ends)
        try:
            yield half
        except BaseException:
            half.close()
            raise

    async def _next(self, conversation: Conversation) -> bytes:
        message = await conversation.receive()
        reason = declined(message)
        if reason is not None:
            raise _Declined(reason)
        return message

    async def _expect(self, conversation: Conversation, kind: int) -> None:
        if await self._next(conversation) != bytes([kind]):
            raise ProtocolError("an RDMA negotiation out of order")
