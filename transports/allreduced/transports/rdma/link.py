"""A link over RDMA: control flow over TCP, one queue pair per data flow, data straight into the posted memory.

Large frames are written into place by the peer's device. The token of a posted receive carries its address and key;
the region behind the key is exactly the posted memory, in a protection domain of this link, and is given back the
moment the receive is over: with its last byte, when it is cancelled, or with the link.

``cancel_receive`` asks the peer to stop first. It answers once no write to that memory is on its way; frames that it
would have sent are told as skipped. Where it does not answer in time (``exposures.REVOKE_TIMEOUT``) the link ends, and
its queue pairs with it: a device may give a key that was taken back to the next region, so that it proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from allreduced.core.errors import ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.transports.outbox import OutgoingFrame
from allreduced.transports.postings import Posting, serial_of, token_of
from allreduced.transports.rdma import causes, exposures, wire
from allreduced.transports.rdma.completions import CompletionWatch
from allreduced.transports.rdma.departures import Departures
from allreduced.transports.rdma.devices import path_text
from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.exposures import Exposures
from allreduced.transports.rdma.flow import RdmaFlow
from allreduced.transports.rdma.memory import address_of
from allreduced.transports.rdma.revocations import Revocations
from allreduced.transports.rdma.sender import Way
from allreduced.transports.rdma.sources import Sources
from allreduced.transports.rdma.verbs_port import Completion, CompletionKind, VerbsError
from allreduced.transports.tcp import wire as tcp_wire
from allreduced.transports.tcp.link import Flow, FlowLink
from allreduced.transports.tcp.stream import Stream

_log = logging.getLogger("allreduced.transports.rdma")


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """What the negotiation told of the other end."""

    depth: int
    """Receive requests that it has per queue pair."""
    small: int
    """Payload bytes that fit into one of its slots."""
    tag: int
    """Stands in all of its tokens."""


class RdmaLink(FlowLink):
    """An authenticated link whose queue pairs are connected and proved. It owns ``endpoint``.

    ``look_every``: seconds between looks whether the device is still there.
    """

    _last_kind: ClassVar[int] = tcp_wire.CARRIER

    def __init__(
        self,
        peer: PeerIdentity,
        control: Stream,
        endpoint: Endpoint,
        remote: RemoteEnd,
        *,
        tag: int,
        mtu: int,
        initiator: bool,
        local_address: str,
        remote_address: str,
        max_frame: int,
        look_every: float,
        version: int,
    ) -> None:
        self._endpoint = endpoint
        self._look_every = look_every
        self._remote = remote
        self._tag = tag
        self._exposures = Exposures(endpoint)
        """Of receives that are posted or being cancelled."""
        self._revocations = Revocations()
        self._departures = Departures(
            Sources(endpoint, self._unregistrable), self._revocations, small=endpoint.small, tag=remote.tag
        )
        self._warned = False
        self._looking: asyncio.TimerHandle | None = None
        super().__init__(
            peer,
            control,
            initiator=initiator,
            local_address=local_address,
            remote_address=remote_address,
            max_frame=min(max_frame, endpoint.local.max_message),
            version=version,
        )
        self.data_path = path_text(endpoint.local, mtu)
        self._watches = [
            CompletionWatch(
                self.loop, queue, self.stats, self._completed, self._verbs_failed, solicited_only=solicited_only
            )
            for queue, solicited_only in ((endpoint.sends, False), (endpoint.receives, True))
        ]

    # The contract

    def post_receive(self, receive: int, buffer: memoryview) -> bytes:  # noqa: D102 - see Link
        serial = serial_of(super().post_receive(receive, buffer))
        posting = self.postings.find(serial)
        if posting is None:  # an empty one, or the link is over
            return wire.Token(serial, self._tag).pack() if self.is_alive() else token_of(serial)
        address = key = 0
        if posting.size > self._endpoint.small:
            address = address_of(posting.view)
            try:
                key = self._exposures.open(posting, address)
            except VerbsError as error:
                self._unregistrable(posting.size, error)
        return wire.Token(serial, self._tag, posting.size, address, key).pack()

    def cancel_receive(self, receive: int) -> None:  # noqa: D102 - see Link
        posting = self.postings.cancel(receive)
        if posting is None:
            return
        self._quarantine.add(receive)
        if posting.in_flight:
            self._redirect(posting)
        if posting.serial not in self._exposures:
            self._free_if_quiet(posting)
            return
        self._exposures.revoke(posting.serial, self._not_confirmed)
        self.send_carrier(wire.Revoke(posting.serial).pack())

    def send(  # noqa: D102 - see Link
        self,
        send: int,
        token: bytes,
        offset: int,
        buffer: memoryview,
        *,
        tag: int = 0,
        priority: int = 0,
        share: int = 0,
    ) -> None:
        if self._departures.is_stopping(send):
            raise ValueError(f"send {send} is being cancelled; its memory is not free yet")
        try:
            target = wire.read_token(token)
        except ProtocolError:
            super().send(
                send, token, offset, buffer, tag=tag, priority=priority, share=share
            )  # says what is wrong with it
            return
        super().send(send, token_of(target.serial), offset, buffer, tag=tag, priority=priority, share=share)
        outgoing = self.outbox.find(send)
        if outgoing is not None:
            self._departures.begin(outgoing, target)

    def cancel_send(self, send: int) -> None:  # noqa: D102 - see Link
        outgoing = self.outbox.cancel(send)
        if outgoing is None:
            return
        self._detach(outgoing)
        if outgoing.in_flight:
            self._departures.stop(send)  # the device reads it; those frames arrive whole
        else:
            self._give_back(send)
            outgoing.view.release()
            self.tell(self.events.sent, send)

    # For the flows

    def way_of(self, frame: OutgoingFrame) -> Way:
        """Decide how a frame goes; one that is written is counted as under way from now on."""
        return self._departures.way_of(frame)

    def write_done(self, serial: int) -> None:
        """Take note that a frame that was written is in place."""
        if self._revocations.end_write(serial):
            self.send_carrier(wire.Revoked(serial).pack())

    def frame_sent(self, frame: OutgoingFrame) -> None:  # noqa: D102 - see FlowOwner
        self.stats.frames_sent += 1
        self.stats.bytes_sent += frame.length
        outgoing = frame.outgoing
        if outgoing is None or not self._departures.is_stopping(outgoing.send):
            over = self.outbox.finished(frame)
        else:
            frame.payload.release()
            outgoing.in_flight -= 1
            over = None if outgoing.in_flight else outgoing.send
            if over is not None:
                outgoing.view.release()
        if over is not None:
            self._give_back(over)
            self.tell(self.events.sent, over)

    def landed(self, posting: Posting, offset: int, length: int, tag: int) -> None:
        """Take note of a frame that is complete; with the last one nothing of the receive is exposed any more."""
        if posting.landed + length == posting.size:
            self._close_exposure(posting.serial)
            if not self.is_alive():
                return  # the device refused
        super().landed(posting, offset, length, tag)

    # Told by the device

    def _completed(self, completions: list[Completion]) -> None:
        receiving: dict[int, RdmaFlow] = {}
        for completion in completions:
            if not self.is_alive():
                return  # a callback ended the link
            flow = self._by_pair[completion.pair]
            if completion.error:
                self._failed(completion)
            elif completion.kind is CompletionKind.SENT:
                flow.sender.completed(completion.identifier)
            else:
                self.last_received = self.loop.time()
                receiving[completion.pair] = flow
                try:
                    flow.receiver.completed(completion)
                except ProtocolError as error:
                    self.violated(error)
        if self.is_alive():
            try:
                for flow in receiving.values():
                    if self.is_alive():  # credits for the flow before may have ended the link
                        flow.receiver.post_again()
            except VerbsError as error:
                self._verbs_failed(error)

    def _failed(self, completion: Completion) -> None:
        """End the link for a request that failed."""
        self._device_says(causes.cause_of_failure(self._endpoint, completion))

    def _verbs_failed(self, error: VerbsError) -> None:
        self._device_says(str(error))

    def _news(self) -> None:
        try:
            cause = causes.cause_of_news(self._endpoint, self._endpoint.device.take_news())
        except VerbsError as error:
            self._verbs_failed(error)
            return
        if cause:
            self._device_says(cause)

    def _device_says(self, cause: str) -> None:
        self.broken(self._in_words(cause))

    def _in_words(self, cause: str) -> str:
        return f"RDMA by {self._endpoint.local.device}: {cause}"

    def _look(self) -> None:
        """End the link where its device is being removed and its driver waits for that without a word."""
        if self._endpoint.device.is_removed():
            self._device_says(causes.REMOVED)
        else:
            self._looking = self.loop.call_later(self._look_every, self._look)

    # Told by the control flow

    def control_ended(self, reason: str) -> None:
        """Take note that the peer is gone; where this end's device knows why, that is the reason."""
        cause = causes.untold_cause(self._endpoint) if self.is_alive() else ""
        super().control_ended(self._in_words(cause) if cause else reason)

    # Told by the other end

    def _carrier_frame(self, payload: bytes) -> None:
        try:
            message = wire.read_carrier(payload)
            if isinstance(message, wire.Credit):
                self._credited(message)
            elif isinstance(message, wire.Revoke):
                if self._revocations.revoke(message.serial):
                    self.send_carrier(wire.Revoked(message.serial).pack())
            else:
                self._confirmed(message.serial)
        except ProtocolError as error:
            self.violated(error)

    def _credited(self, credit: wire.Credit) -> None:
        if credit.flow >= len(self._flows):
            raise ProtocolError(f"credits for flow {credit.flow} of {len(self._flows)}")
        sender = self._flows[credit.flow].sender
        if not 0 < credit.count <= self._remote.depth - sender.credits:
            raise ProtocolError(f"{credit.count} credits, where it has {self._remote.depth} receive requests in all")
        sender.credits += credit.count
        sender.wake()

    def _confirmed(self, serial: int) -> None:
        if self._exposures.is_revoked(serial):  # else it comes too late; the memory was taken back
            self._close_revoked(serial)

    def _not_confirmed(self, serial: int) -> None:
        if self.is_closing():
            self._close_revoked(serial)  # nothing is posted here any more, so nothing gets its key
        else:
            self.broken(
                f"the peer did not confirm within {exposures.REVOKE_TIMEOUT:g} s that it writes to a receive no more"
            )

    def _close_revoked(self, serial: int) -> None:
        posting = self._close_exposure(serial)
        if posting is not None:
            self._free_if_quiet(posting)

    # Asked for by FlowLink

    def _make_flows(self) -> Sequence[Flow]:
        # The proof of each direction used up one request.
        self._flows = [
            RdmaFlow(self, index, self._endpoint, credit=self._remote.depth - 1, room=self._remote.small)
            for index in range(len(self._endpoint.pairs))
        ]
        self._by_pair = {flow.pair.number: flow for flow in self._flows}
        return self._flows

    def _start(self) -> None:
        super()._start()
        self.loop.add_reader(self._endpoint.device.descriptor, self._news)
        self._looking = self.loop.call_later(self._look_every, self._look)
        for watch in self._watches:
            watch.start()

    def _tear_down(self) -> None:
        for watch in self._watches:
            watch.stop()
        self.loop.remove_reader(self._endpoint.device.descriptor)
        if self._looking is not None:
            self._looking.cancel()
        self._endpoint.close()  # from here on the device touches nothing
        super()._tear_down()
        self._exposures.clear()
        for outgoing in self._departures.stopping():
            outgoing.view.release()
            self.tell(self.events.sent, outgoing.send)
        self._departures.clear()

    # Inside

    def _free_if_quiet(self, posting: Posting) -> None:
        if posting.serial not in self._exposures:  # else it is free once the peer cannot write to it any more
            super()._free_if_quiet(posting)

    def _unregistrable(self, nbytes: int, error: VerbsError) -> None:
        """Say once that data of this link is copied through messages, and why."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "event=rdma_registration_failed peer=%s bytes=%d error=%r effect=%s",
                self.peer.node,
                nbytes,
                str(error),
                "such data is copied on this link; is the limit for locked memory (ulimit -l) high enough?",
            )

    def _close_exposure(self, serial: int) -> Posting | None:
        try:
            return self._exposures.close(serial)
        except VerbsError as error:
            self._verbs_failed(error)  # that closes the queue pairs, and nothing is touched any more
            return None

    def _give_back(self, send: int) -> None:
        """Forget a send that is over."""
        for flow in self._flows:
            flow.sender.forget(send)
        region = self._departures.end(send)
        if region is not None:
            try:
                self._endpoint.release(region)
            except VerbsError as error:
                self._verbs_failed(error)
