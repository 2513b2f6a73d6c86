"""Queue pairs: connected once, and given work as chains of requests."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from allreduced.transports.rdma.verbs.binding import Modules, translated
from allreduced.transports.rdma.verbs.codes import gid_text
from allreduced.transports.rdma.verbs.handles import Closable
from allreduced.transports.rdma.verbs_port import MTUS, PathTo, ReceiveRequest, SendKind, SendRequest


class Pair(Closable):
    """Implements ``verbs_port.QueuePair``. ``max_inline``: bytes that the device granted for inline sends."""

    def __init__(self, modules: Modules, handle: Any, max_inline: int) -> None:
        super().__init__("a queue pair", handle)
        self._modules = modules
        self.number: int = handle.qp_num
        self.max_inline = max_inline
        enums = modules.enums
        self._opcodes = {
            SendKind.SEND: enums.IBV_WR_SEND,
            SendKind.WRITE_WITH_IMMEDIATE: enums.IBV_WR_RDMA_WRITE_WITH_IMM,
        }
        self._signalled = int(enums.IBV_SEND_SIGNALED)
        self._solicited = int(enums.IBV_SEND_SOLICITED)
        self._inline = int(enums.IBV_SEND_INLINE)

    def connect(self, path: PathTo) -> None:
        """See ``verbs_port.QueuePair``."""
        addr, qp = self._modules.addr, self._modules.qp
        with translated("cannot connect a queue pair"):
            route = addr.GlobalRoute(
                dgid=addr.GID(gid_text(path.remote_gid)),
                sgid_index=path.local.gid.index,
                hop_limit=path.hop_limit,
                traffic_class=path.traffic_class,
            )
            attributes = qp.QPAttr(port_num=path.local.port)
            attributes.ah_attr = addr.AHAttr(
                gr=route, is_global=1, port_num=path.local.port, dlid=path.remote_lid, sl=path.service_level
            )
            attributes.qp_access_flags = int(self._modules.enums.IBV_ACCESS_REMOTE_WRITE)
            attributes.path_mtu = MTUS.index(path.mtu) + 1
            attributes.dest_qp_num = path.remote_pair
            attributes.rq_psn = path.remote_psn
            attributes.sq_psn = path.local_psn
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
            attributes.min_rnr_timer = 12  # 0.64 ms
            attributes.timeout = path.timeout
            attributes.retry_cnt = path.retry_count
            attributes.rnr_retry = path.rnr_retry
            self._handle.to_rts(attributes)

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        """See ``verbs_port.QueuePair``."""
        wr = self._modules.wr
        made: list[Any] = []
        try:
            following = None
            for request in reversed(requests):
                element = wr.SGE(request.address, request.length, request.key)
                made.append(element)
                flags = self._signalled if request.signalled else 0
                if request.solicited:
                    flags |= self._solicited
                if request.inline:
                    flags |= self._inline
                following = wr.SendWR(
                    wr_id=request.identifier,
                    opcode=self._opcodes[request.kind],
                    num_sge=1,
                    imm_data=socket.htonl(request.immediate),
                    sg=[element],
                    send_flags=flags,
                    next_wr=following,
                )
                made.append(following)
                if request.kind is SendKind.WRITE_WITH_IMMEDIATE:
                    following.set_wr_rdma(request.remote_key, request.remote_address)
            if following is not None:
                with translated("cannot post a send request"):
                    self._open_handle().post_send(following)
        finally:
            for item in made:
                item.close()

    def post_receive(self, requests: Sequence[ReceiveRequest]) -> None:
        """See ``verbs_port.QueuePair``."""
        wr = self._modules.wr
        made: list[Any] = []
        try:
            following = None
            for request in reversed(requests):
                element = wr.SGE(request.address, request.length, request.key)
                made.append(element)
                following = wr.RecvWR(wr_id=request.identifier, num_sge=1, sg=[element], next_wr=following)
                made.append(following)
            if following is not None:
                with translated("cannot post a receive request"):
                    self._open_handle().post_recv(following)
        finally:
            for item in made:
                item.close()
