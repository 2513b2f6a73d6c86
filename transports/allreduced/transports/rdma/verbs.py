"""Verbs of this machine, on pyverbs. The only module that imports it, and the only one that knows its generations.

pyverbs keeps Python's lock in every call, so nothing here may block: events are taken only where a descriptor is
readable. Its work requests and scatter-gather elements leak unless closed, and crash when closed twice.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.verbs_port import (
    MTUS,
    AsyncKind,
    AsyncNews,
    Completion,
    CompletionKind,
    CompletionQueue,
    Device,
    DeviceInfo,
    Domain,
    GidEntry,
    GidKind,
    LinkLayer,
    PathTo,
    PortInfo,
    PortState,
    QueuePair,
    ReceiveRequest,
    Region,
    SendKind,
    SendRequest,
    Verbs,
    VerbsError,
)

_MISSING_HINT: Final = (
    "install the package python3-pyverbs of Debian or Ubuntu (rdma-core on others) for the Python that runs the agent,"
    " or set the transport to tcp"
)
_ENUM_MODULES: Final = ("pyverbs.enums", "pyverbs.libibverbs_enums")
"""Where the constants are: up to rdma-core 50 or so, and after that."""

_STATES: Final[dict[int, PortState]] = {1: "down", 2: "init", 3: "armed", 4: "active", 5: "active"}
_LAYERS: Final[dict[int, LinkLayer]] = {1: "infiniband", 2: "ethernet"}
_GID_KINDS: Final[dict[int, GidKind]] = {0: "ib", 1: "roce_v1", 2: "roce_v2"}

_STATUS: Final = {
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error: the memory is not registered for that",
    5: "flushed",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "the peer calls the request invalid",
    10: "the peer refuses access to its memory",
    11: "the peer failed to complete it",
    12: "no acknowledgement of the peer after all retries",
    13: "the peer had no receive request after all retries",
    20: "fatal error of the device",
    21: "no response in time",
    22: "general error",
}
"""What the status of a work completion means (``enum ibv_wc_status``)."""
_FLUSHED: Final = 5

_OPCODE_RECEIVED: Final = 128
_OPCODE_WRITTEN: Final = 129

_NEWS: Final = {
    0: (AsyncKind.QUEUE_FAILED, "completion queue error"),
    1: (AsyncKind.PAIR_FAILED, "queue pair error"),
    2: (AsyncKind.PAIR_FAILED, "invalid request at a queue pair"),
    3: (AsyncKind.PAIR_FAILED, "access violation at a queue pair"),
    8: (AsyncKind.DEVICE_GONE, "the device failed or was removed"),
    10: (AsyncKind.PORT_DOWN, "the port went down"),
}
"""What asynchronous events mean (``enum ibv_event_type``)."""


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn what pyverbs raises into ``VerbsError``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise VerbsError(f"{what}: {error}", getattr(error, "errno", 0) or 0) from error
    except Exception as error:
        if not type(error).__module__.startswith("pyverbs"):
            raise
        raise VerbsError(f"{what}: {error}", getattr(error, "error_code", 0) or 0) from error


class _Modules:
    """The modules of pyverbs; the difference between its generations ends here."""

    def __init__(self) -> None:
        self.device: Any = importlib.import_module("pyverbs.device")
        self.pd: Any = importlib.import_module("pyverbs.pd")
        self.cq: Any = importlib.import_module("pyverbs.cq")
        self.mr: Any = importlib.import_module("pyverbs.mr")
        self.qp: Any = importlib.import_module("pyverbs.qp")
        self.wr: Any = importlib.import_module("pyverbs.wr")
        self.addr: Any = importlib.import_module("pyverbs.addr")
        self.enums: Any = self._enums()

    @staticmethod
    def _enums() -> Any:
        for name in _ENUM_MODULES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        raise ImportError(f"neither of {', '.join(_ENUM_MODULES)} is there")


@cache
def load() -> Verbs:
    """Import pyverbs and return the verbs of this machine.

    :raises ConfigError: pyverbs is not installed, or one that this module does not know.
    """
    try:
        return PyverbsVerbs(_Modules())
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "pyverbs"
        text = "pyverbs is not installed" if missing else f"pyverbs is installed but cannot be used: {error}"
        raise ConfigError(f"RDMA cannot be used: {text}", hint=_MISSING_HINT) from error


class PyverbsVerbs:
    """Implements ``verbs_port.Verbs``."""

    def __init__(self, modules: _Modules) -> None:
        self._modules = modules

    def devices(self) -> Sequence[DeviceInfo]:
        """Return all devices with their ports and GIDs as they are now; empty where there is none."""
        try:
            with _translated("cannot list the RDMA devices"):
                names = [_text(device.name) for device in self._modules.device.get_device_list()]
        except VerbsError:
            return ()  # the answer of a kernel without any device
        return [self._describe(name) for name in names]

    def open(self, name: str) -> Device:
        """Open a device; see ``verbs_port.Verbs``."""
        return _Device(self._modules, name)

    def _describe(self, name: str) -> DeviceInfo:
        try:
            with _translated(f"RDMA device {name}"):
                context = self._modules.device.Context(name=name)
        except VerbsError as error:
            return DeviceInfo(name, (), problem=str(error))
        try:
            with _translated(f"RDMA device {name}"):
                attributes = context.query_device()
                gids = list(_gids(context, attributes.phys_port_cnt))
                ports = tuple(_port(context, number, gids) for number in range(1, attributes.phys_port_cnt + 1))
                return DeviceInfo(
                    name,
                    ports,
                    max_queue_pairs=attributes.max_qp,
                    max_work_requests=attributes.max_qp_wr,
                    max_completions=attributes.max_cqe,
                    max_regions=attributes.max_mr,
                    max_region_size=attributes.max_mr_size,
                )
        except VerbsError as error:
            return DeviceInfo(name, (), problem=str(error))
        finally:
            context.close()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _value(attribute: Any) -> Any:
    """Return what one generation has as a method and another as a property."""
    return attribute() if callable(attribute) else attribute


def _gids(context: Any, ports: int) -> Iterator[tuple[int, GidEntry]]:
    """Yield port number and entry of every GID that is set."""
    lengths = {number: context.query_port(number).gid_tbl_len for number in range(1, ports + 1)}
    for entry in context.query_gid_table(sum(lengths.values())):
        interface = _value(entry.ndev_ifindex)
        try:
            name = socket.if_indextoname(interface) if interface else ""
        except OSError:
            name = ""  # gone, or of another network namespace
        gid = ipaddress.IPv6Address(_value(entry.gid_str)).packed
        kind = _GID_KINDS.get(_value(entry.gid_type), "ib")
        yield _value(entry.port_num), GidEntry(_value(entry.gid_index), gid, kind, name)


def _port(context: Any, number: int, gids: Sequence[tuple[int, GidEntry]]) -> PortInfo:
    port = context.query_port(number)
    return PortInfo(
        number,
        _STATES.get(port.state, "unknown"),
        _LAYERS.get(port.link_layer, "infiniband" if port.lid else "unknown"),
        active_mtu=MTUS[port.active_mtu - 1] if 1 <= port.active_mtu <= len(MTUS) else MTUS[0],
        max_message=port.max_msg_sz,
        lid=port.lid,
        gids=tuple(entry for owner, entry in gids if owner == number),
    )


def _event_descriptors() -> set[int]:
    """Return the descriptors of this process that verbs events come through."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in str(entry.readlink()):
                found.add(int(entry.name))
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _with_descriptor(make: Callable[[], Any]) -> tuple[Any, int]:
    """Make something that opens one event descriptor, and return both.

    pyverbs 44 does not tell the descriptor of a channel, none tells that of a device.
    """
    before = _event_descriptors()
    made = make()
    new = _event_descriptors() - before
    if len(new) != 1:
        made.close()
        raise VerbsError(f"{len(new)} new event descriptors where one was expected")
    return made, new.pop()


class _Closable:
    """Closes an object of pyverbs once."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self._handle = handle
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with _translated(f"cannot close {self._name}"):
                self._handle.close()


class _Device(_Closable):
    def __init__(self, modules: _Modules, name: str) -> None:
        self._modules = modules
        with _translated(f"cannot open the RDMA device {name}"):
            context, self.descriptor = _with_descriptor(lambda: modules.device.Context(name=name))
        super().__init__(f"the RDMA device {name}", context)

    def take_news(self) -> AsyncNews:
        with _translated("cannot read an event of the device"):
            event = self._handle.get_async_event()
            event.ack()
        number = int(event.event_type)
        kind, text = _NEWS.get(number, (AsyncKind.OTHER, f"event {number}"))
        return AsyncNews(kind, text)

    def create_domain(self) -> Domain:
        with _translated("cannot make a protection domain"):
            return _Domain(self._modules, self._modules.pd.PD(self._handle))

    def create_queue(self, depth: int) -> CompletionQueue:
        with _translated("cannot make a completion queue"):
            channel, descriptor = _with_descriptor(lambda: self._modules.cq.CompChannel(self._handle))
            try:
                queue = self._modules.cq.CQ(self._handle, depth, None, channel, 0)
            except BaseException:
                channel.close()
                raise
        return _Queue(queue, channel, descriptor)


class _Domain(_Closable):
    def __init__(self, modules: _Modules, handle: Any) -> None:
        super().__init__("a protection domain", handle)
        self._modules = modules

    def register(self, address: int, length: int, *, local_write: bool, remote_write: bool) -> Region:
        enums = self._modules.enums
        access = 0
        if local_write or remote_write:
            access |= int(enums.IBV_ACCESS_LOCAL_WRITE)
        if remote_write:
            access |= int(enums.IBV_ACCESS_REMOTE_WRITE)
        with _translated(f"cannot register {length} bytes"):
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
        with _translated("cannot make a queue pair"):
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
            return _Pair(self._modules, pair, granted)


class _Region(_Closable):
    def __init__(self, handle: Any) -> None:
        super().__init__("a memory region", handle)
        self.local_key: int = handle.lkey
        self.remote_key: int = handle.rkey


class _Queue(_Closable):
    def __init__(self, handle: Any, channel: Any, descriptor: int) -> None:
        super().__init__("a completion queue", handle)
        self.handle = handle
        self.descriptor = descriptor
        self._channel = _Closable("a completion channel", channel)

    def arm(self, *, solicited_only: bool = False) -> None:
        with _translated("cannot ask for completion events"):
            self.handle.req_notify(solicited_only)

    def take_event(self) -> None:
        with _translated("cannot take a completion event"):
            self._channel._handle.get_cq_event(self.handle)
            self.handle.ack_events(1)

    def poll(self, most: int) -> list[Completion]:
        with _translated("cannot poll a completion queue"):
            entries = self.handle.poll(most)[1]
        return [_completion(entry) for entry in entries]

    def close(self) -> None:
        super().close()
        self._channel.close()


def _completion(entry: Any) -> Completion:
    status = int(entry.status)
    if status:
        text = _STATUS.get(status, f"status {status}")
        return Completion(entry.wr_id, CompletionKind.SENT, entry.qp_num, error=text, flushed=status == _FLUSHED)
    opcode = int(entry.opcode)
    if opcode == _OPCODE_RECEIVED:
        return Completion(entry.wr_id, CompletionKind.RECEIVED, entry.qp_num, entry.byte_len)
    if opcode == _OPCODE_WRITTEN:
        return Completion(
            entry.wr_id, CompletionKind.WRITTEN, entry.qp_num, entry.byte_len, socket.ntohl(entry.imm_data)
        )
    return Completion(entry.wr_id, CompletionKind.SENT, entry.qp_num)


class _Pair(_Closable):
    def __init__(self, modules: _Modules, handle: Any, max_inline: int) -> None:
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
        addr, qp = self._modules.addr, self._modules.qp
        with _translated("cannot connect a queue pair"):
            route = addr.GlobalRoute(
                dgid=addr.GID(ipaddress.IPv6Address(path.remote_gid).exploded),
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
                with _translated("cannot post a send request"):
                    self._handle.post_send(following)
        finally:
            for item in made:
                item.close()

    def post_receive(self, requests: Sequence[ReceiveRequest]) -> None:
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
                with _translated("cannot post a receive request"):
                    self._handle.post_recv(following)
        finally:
            for item in made:
                item.close()
