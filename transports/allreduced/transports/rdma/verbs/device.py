"""An open device, and what is made of it but for queue pairs."""

from __future__ import annotations

from typing import Any

from allreduced.transports.rdma.presence import Presence
from allreduced.transports.rdma.verbs.binding import Modules, translated
from allreduced.transports.rdma.verbs.codes import STATES, completion, news
from allreduced.transports.rdma.verbs.handles import Closable, with_descriptor
from allreduced.transports.rdma.verbs.pair import Pair
from allreduced.transports.rdma.verbs_port import AsyncNews, Completion, CompletionQueue, Domain, QueuePair, Region


class OpenDevice(Closable):
    """Implements ``verbs_port.Device``."""

    def __init__(self, modules: Modules, name: str) -> None:
        self._modules = modules
        with translated(f"cannot open the RDMA device {name}"):
            context, self.descriptor = with_descriptor(lambda: modules.device.Context(name=name))
        super().__init__(f"the RDMA device {name}", context)
        self._presence = Presence(name)

    def take_news(self) -> AsyncNews:
        """See ``verbs_port.Device``."""
        with translated("cannot read an event of the device"):
            event = self._handle.get_async_event()
            event.ack()
        return news(int(event.event_type))

    def is_active(self, port: int) -> bool:
        """See ``verbs_port.Device``."""
        with translated(f"cannot query port {port}"):
            state: int = self._handle.query_port(port).state
        return STATES.get(state) == "active"

    def is_removed(self) -> bool:
        """See ``verbs_port.Device``."""
        return self._presence.is_over()

    def create_domain(self) -> Domain:
        """See ``verbs_port.Device``."""
        with translated("cannot make a protection domain"):
            return _Domain(self._modules, self._modules.pd.PD(self._handle))

    def create_queue(self, depth: int) -> CompletionQueue:
        """See ``verbs_port.Device``."""
        with translated("cannot make a completion queue"):
            channel, descriptor = with_descriptor(lambda: self._modules.cq.CompChannel(self._handle))
            try:
                queue = self._modules.cq.CQ(self._handle, depth, None, channel, 0)
            except BaseException:
                channel.close()
                raise
        return _Queue(queue, channel, descriptor)


class _Domain(Closable):
    def __init__(self, modules: Modules, handle: Any) -> None:
        super().__init__("a protection domain", handle)
        self._modules = modules

    def register(self, address: int, length: int, *, local_write: bool, remote_write: bool) -> Region:
        enums = self._modules.enums
        access = 0
        if local_write or remote_write:
            access |= int(enums.IBV_ACCESS_LOCAL_WRITE)
        if remote_write:
            access |= int(enums.IBV_ACCESS_REMOTE_WRITE)
        with translated(f"cannot register {length} bytes"):
            return _Region(self._modules.mr.MR(self._handle, length, access, address=address))

    def create_pair(
        self,
        sends: CompletionQueue,
        receives: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int,
        max_inline: int,
        port: int,
    ) -> QueuePair:
        if not isinstance(sends, _Queue) or not isinstance(receives, _Queue):
            raise TypeError("completion queues of other verbs")
        qp, enums = self._modules.qp, self._modules.enums
        with translated("cannot make a queue pair"):
            caps = qp.QPCap(
                max_send_wr=send_depth,
                max_recv_wr=receive_depth,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=max_inline,
            )
            initial = qp.QPInitAttr(
                qp_type=enums.IBV_QPT_RC, scq=sends.handle, rcq=receives.handle, cap=caps, sq_sig_all=0
            )
            pair = qp.QP(self._handle, initial)
            try:
                attributes = qp.QPAttr(port_num=port)
                attributes.qp_access_flags = int(enums.IBV_ACCESS_REMOTE_WRITE)
                pair.to_init(attributes)
                granted = pair.query(enums.IBV_QP_CAP)[0].cap.max_inline_data
            except BaseException:
                pair.close()
                raise
            return Pair(self._modules, pair, granted)


class _Region(Closable):
    def __init__(self, handle: Any) -> None:
        super().__init__("a memory region", handle)
        self.local_key: int = handle.lkey
        self.remote_key: int = handle.rkey


class _Queue(Closable):
    def __init__(self, handle: Any, channel: Any, descriptor: int) -> None:
        super().__init__("a completion queue", handle)
        self.handle = handle
        self.descriptor = descriptor
        self._channel = channel
        self._closable_channel = Closable("a completion channel", channel)

    def arm(self, *, solicited_only: bool = False) -> None:
        with translated("cannot ask for completion events"):
            self.handle.req_notify(solicited_only)

    def take_event(self) -> None:
        with translated("cannot take a completion event"):
            self._channel.get_cq_event(self.handle)
            self.handle.ack_events(1)

    def poll(self, most: int) -> list[Completion]:
        with translated("cannot poll a completion queue"):
            entries = self.handle.poll(most)[1]
        return [completion(entry) for entry in entries]

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._closable_channel.close()
