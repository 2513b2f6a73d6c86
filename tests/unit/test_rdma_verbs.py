"""The module that imports pyverbs, on a pyverbs of plain objects: both generations, errors, nothing leaked."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma import verbs
from allreduced.transports.rdma.devices import choose
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs.binding import Modules
from allreduced.transports.rdma.verbs.codes import gid_text
from allreduced.transports.rdma.verbs_port import (
    AsyncKind,
    CompletionKind,
    PathTo,
    ReceiveRequest,
    SendKind,
    SendRequest,
    VerbsError,
)


class RDMAError(Exception):
    """As pyverbs raises it; the module is what counts."""

    __module__ = "pyverbs.pyverbs_error"

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.error_code = code


def _event_descriptor() -> int:
    """Return a descriptor that looks like one of verbs, which this machine cannot make."""
    return os.memfd_create("infinibandevent")


class _Thing:
    """Remembers its arguments and whether it was closed; closing twice is what crashes pyverbs."""

    made: ClassVar[list[_Thing]] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named
        self.closed = 0
        _Thing.made.append(self)

    def close(self) -> None:
        self.closed += 1
        assert self.closed == 1


class _Queue(_Thing):
    entries: ClassVar[list[Any]] = []
    acknowledged = 0

    def poll(self, most: int) -> tuple[int, list[Any]]:
        found, self.entries[:] = self.entries[:most], self.entries[most:]
        return len(found), found

    def req_notify(self, solicited_only: bool) -> None:
        self.armed = solicited_only

    def ack_events(self, count: int) -> None:
        self.acknowledged += count


class _Channel(_Thing):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hidden = _event_descriptor()
        self.events = 0

    def get_cq_event(self, queue: object) -> None:
        self.events += 1

    def close(self) -> None:
        super().close()
        os.close(self.hidden)


class _Attributes:
    max_qp, max_qp_wr, max_cqe, max_mr, max_mr_size, phys_port_cnt = 10, 20, 30, 40, 50, 1


class _PortAttributes:
    state, link_layer, active_mtu, max_msg_sz, lid, gid_tbl_len = 4, 2, 5, 1 << 23, 0, 2


class _Gid:
    def __init__(self, index: int, text: str, kind: int) -> None:
        self.gid_index, self._text, self.gid_type, self.port_num, self.ndev_ifindex = index, text, kind, 1, 0

    def gid_str(self) -> str:
        return self._text


class _Event:
    def __init__(self, number: int) -> None:
        self.event_type = number

    def ack(self) -> None:
        return None


class _Context(_Thing):
    denied = False
    news: ClassVar[list[int]] = []

    def __init__(self, name: str) -> None:
        if self.denied:
            raise RDMAError("Failed to open device rxe0. Errno: 13, Permission denied", 13)
        super().__init__(name)
        self.hidden = _event_descriptor()

    def query_device(self) -> _Attributes:
        return _Attributes()

    def query_port(self, number: int) -> _PortAttributes:
        return _PortAttributes()

    def query_gid_table(self, most: int) -> list[_Gid]:
        return [_Gid(0, "fe80::1", 2), _Gid(1, "::ffff:10.77.0.1", 2)][:most]

    def get_async_event(self) -> _Event:
        return _Event(self.news.pop(0))

    def close(self) -> None:
        super().close()
        os.close(self.hidden)


class _Device:
    name = b"rxe0"


class _Pair(_Thing):
    qp_num = 17
    full = False

    def to_init(self, attributes: Any) -> None:
        self.init = attributes

    def to_rts(self, attributes: Any) -> None:
        self.path = attributes

    def query(self, what: int) -> tuple[Any, None]:
        attributes = ModuleType("attributes")
        attributes.cap = ModuleType("cap")  # type: ignore[attr-defined]
        attributes.cap.max_inline_data = 64
        return attributes, None

    def post_send(self, request: Any) -> None:
        if self.full:
            raise RDMAError("Failed to post send", 12)
        self.sent = request

    def post_recv(self, request: Any) -> None:
        self.received = request


class _SendWR(_Thing):
    def set_wr_rdma(self, key: int, address: int) -> None:
        self.remote = (key, address)


class _MR(_Thing):
    lkey, rkey = 5, 6

    def __init__(self, domain: object, length: int, access: int, address: int) -> None:
        if length > 1000:
            raise RDMAError("Failed to register a MR. Errno: 12, Cannot allocate memory", 12)
        super().__init__(domain, length, access, address)


class _QPAttr:
    def __init__(self, port_num: int) -> None:
        self.port_num = port_num


_ENUMS: dict[str, object] = {
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 2,
    "IBV_QPT_RC": 2,
    "IBV_QP_CAP": 1 << 19,
    "IBV_WR_SEND": 2,
    "IBV_WR_RDMA_WRITE_WITH_IMM": 1,
    "IBV_SEND_SIGNALED": 2,
    "IBV_SEND_SOLICITED": 4,
    "IBV_SEND_INLINE": 8,
}


@pytest.fixture(params=["pyverbs.enums", "pyverbs.libibverbs_enums"])
def fake_pyverbs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> verbs.PyverbsVerbs:
    """Return the verbs on a pyverbs of either generation."""
    contents: dict[str, dict[str, object]] = {
        "pyverbs.device": {"Context": _Context, "get_device_list": lambda: [_Device()]},
        "pyverbs.pd": {"PD": _Thing},
        "pyverbs.cq": {"CQ": _Queue, "CompChannel": _Channel},
        "pyverbs.mr": {"MR": _MR},
        "pyverbs.qp": {"QP": _Pair, "QPCap": _Named, "QPInitAttr": _Named, "QPAttr": _QPAttr},
        "pyverbs.wr": {"SGE": _Thing, "SendWR": _SendWR, "RecvWR": _Thing},
        "pyverbs.addr": {"GlobalRoute": _Named, "GID": str, "AHAttr": _Named},
        request.param: _ENUMS,
    }
    for name in ("pyverbs.enums", "pyverbs.libibverbs_enums"):
        monkeypatch.setitem(sys.modules, name, None)  # an import that fails
    for name, things in {"pyverbs": {}, **contents}.items():
        module = ModuleType(name)
        module.__dict__.update(things)
        monkeypatch.setitem(sys.modules, name, module)
    _Thing.made.clear()
    _Queue.entries.clear()
    _Context.news.clear()
    monkeypatch.setattr(_Context, "denied", False)
    monkeypatch.setattr(_Pair, "full", False)
    return verbs.PyverbsVerbs(Modules())


class _Named:
    def __init__(self, **named: Any) -> None:
        self.named = named


def test_devices_with_their_ports_and_gids(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    (device,) = fake_pyverbs.devices()
    assert (device.name, device.problem) == ("rxe0", "")
    (port,) = device.ports
    assert (port.state, port.link_layer, port.active_mtu, port.max_message) == ("active", "ethernet", 4096, 1 << 23)
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, "roce_v2"), (1, "roce_v2")]
    assert port.gids[1].gid == bytes(10) + b"\xff\xff\x0a\x4d\x00\x01"
    assert [thing.closed for thing in _Thing.made] == [1]


def test_a_device_that_may_not_be_opened_is_listed_with_the_reason(
    fake_pyverbs: verbs.PyverbsVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Context, "denied", True)
    (device,) = fake_pyverbs.devices()
    assert "Permission denied" in device.problem
    with pytest.raises(VerbsError, match="Permission denied") as caught:
        fake_pyverbs.open("rxe0")
    assert caught.value.errno == 13


def test_everything_is_closed_once(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    device = fake_pyverbs.open("rxe0")
    domain = device.create_domain()
    queue, other = device.create_queue(8), device.create_queue(8)
    assert len({device.descriptor, queue.descriptor, other.descriptor}) == 3
    region = domain.register(4096, 100, local_write=True, remote_write=True)
    assert (region.local_key, region.remote_key) == (5, 6)
    pair = domain.create_pair(queue, other, send_depth=4, receive_depth=4, max_inline=100, port=1)
    assert (pair.number, pair.max_inline) == (17, 64)
    pair.post_receive([ReceiveRequest(1, 4096, 10, 5), ReceiveRequest(2, 5000, 10, 5)])
    pair.post_send(
        [
            SendRequest(1, SendKind.SEND, 4096, 4, 5, signalled=False, solicited=False, inline=True),
            SendRequest(
                2, SendKind.WRITE_WITH_IMMEDIATE, 4096, 9, 5, remote_address=77, remote_key=6, immediate=0x01020304
            ),
        ]
    )
    first = pair._handle.sent  # type: ignore[attr-defined]
    second = first.named["next_wr"]
    assert (first.named["send_flags"], second.named["send_flags"]) == (8, 6)
    assert second.named["imm_data"].to_bytes(4, sys.byteorder) == b"\1\2\3\4"
    assert second.remote == (6, 77)
    for what in (pair, region, queue, other, domain, device):
        what.close()
        what.close()
    assert [type(thing).__name__ for thing in _Thing.made if thing.closed != 1] == []


def test_requests_are_closed_although_posting_fails(
    fake_pyverbs: verbs.PyverbsVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake_pyverbs.open("rxe0")
    queue = device.create_queue(8)
    pair = device.create_domain().create_pair(queue, queue, send_depth=4, receive_depth=4, max_inline=0, port=1)
    monkeypatch.setattr(_Pair, "full", True)
    before = len(_Thing.made)
    with pytest.raises(VerbsError, match="cannot post a send request: Failed to post send") as caught:
        pair.post_send([SendRequest(1, SendKind.SEND, 4096, 4, 5)])
    assert caught.value.errno == 12
    assert [thing.closed for thing in _Thing.made[before:]] == [1, 1]
    queue.close()
    device.close()


def test_nothing_is_posted_on_a_closed_queue_pair(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    device = fake_pyverbs.open("rxe0")
    queue = device.create_queue(8)
    pair = device.create_domain().create_pair(queue, queue, send_depth=4, receive_depth=4, max_inline=0, port=1)
    pair.close()
    with pytest.raises(VerbsError, match="a queue pair was closed"):
        pair.post_send([SendRequest(1, SendKind.SEND, 4096, 4, 5)])
    with pytest.raises(VerbsError, match="a queue pair was closed"):
        pair.post_receive([ReceiveRequest(1, 4096, 10, 5)])
    assert not hasattr(pair._handle, "sent")  # type: ignore[attr-defined]
    queue.close()
    device.close()


def test_a_channel_is_closed_although_its_queue_is_not(
    fake_pyverbs: verbs.PyverbsVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake_pyverbs.open("rxe0")
    queue = device.create_queue(8)
    (channel,) = (thing for thing in _Thing.made if isinstance(thing, _Channel))

    def refused(self: object) -> None:
        raise RDMAError("Failed to destroy CQ", 5)

    with monkeypatch.context() as patched:
        patched.setattr(_Queue, "close", refused)
        with pytest.raises(VerbsError, match="Failed to destroy CQ"):
            queue.close()
    assert channel.closed == 1
    device.close()


def test_memory_that_cannot_be_registered(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    device = fake_pyverbs.open("rxe0")
    domain = device.create_domain()
    with pytest.raises(VerbsError, match=r"cannot register 2000 bytes: .*Cannot allocate memory"):
        domain.register(4096, 2000, local_write=False, remote_write=False)
    made = domain.register(4096, 10, local_write=False, remote_write=False)
    assert made._handle.arguments[2] == 0  # type: ignore[attr-defined] # no access but to read it here
    made.close()
    device.close()


class _WC:
    def __init__(self, status: int, opcode: int, immediate: int = 0) -> None:
        self.wr_id, self.qp_num, self.byte_len = 3, 17, 10
        self.status, self.opcode = status, opcode
        self.imm_data = int.from_bytes(immediate.to_bytes(4, "big"), sys.byteorder)


def test_completions(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    device = fake_pyverbs.open("rxe0")
    queue = device.create_queue(8)
    _Queue.entries.extend([_WC(0, 0), _WC(0, 128), _WC(0, 129, 0x01020304), _WC(12, 0), _WC(5, 0), _WC(99, 0)])
    queue.arm(solicited_only=True)
    queue.take_event()
    found = queue.poll(10)
    assert [one.kind for one in found[:3]] == [CompletionKind.SENT, CompletionKind.RECEIVED, CompletionKind.WRITTEN]
    assert found[2].immediate == 0x01020304
    assert (found[3].error, found[3].flushed) == ("no acknowledgement of the peer after all retries", False)
    assert (found[4].error, found[4].flushed) == ("flushed", True)
    assert found[5].error == "status 99"
    queue.close()
    device.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(8, AsyncKind.DEVICE_GONE), (10, AsyncKind.PORT_DOWN), (9, AsyncKind.OTHER)]
)
def test_news_of_the_device(fake_pyverbs: verbs.PyverbsVerbs, number: int, kind: AsyncKind) -> None:
    device = fake_pyverbs.open("rxe0")
    _Context.news.append(number)
    assert device.take_news().kind is kind
    device.close()


@pytest.mark.parametrize(("state", "active"), [(1, False), (2, False), (4, True), (5, True), (9, False)])
def test_a_port_is_asked_for_its_state(
    fake_pyverbs: verbs.PyverbsVerbs, state: int, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake_pyverbs.open("rxe0")
    monkeypatch.setattr(_PortAttributes, "state", state)
    assert device.is_active(1) is active
    device.close()


def test_a_path_is_set_as_it_was_agreed(fake_pyverbs: verbs.PyverbsVerbs) -> None:
    local = choose(fake_pyverbs.devices(), RdmaOptions(), "10.77.0.1")
    device = fake_pyverbs.open("rxe0")
    queue = device.create_queue(8)
    pair = device.create_domain().create_pair(queue, queue, send_depth=4, receive_depth=4, max_inline=0, port=1)
    remote = bytes(10) + b"\xff\xff\x0a\x4d\x00\x02"
    pair.connect(PathTo(local, 1024, remote, 0, 18, 5, 6, 14, 7, 6, 104, 3, 64))
    path = pair._handle.path  # type: ignore[attr-defined]
    assert (path.path_mtu, path.dest_qp_num, path.sq_psn, path.rq_psn) == (3, 18, 5, 6)
    assert (path.timeout, path.retry_cnt, path.rnr_retry) == (14, 7, 6)
    assert path.ah_attr.named["gr"].named["sgid_index"] == 1
    assert path.ah_attr.named["gr"].named["traffic_class"] == 104
    assert path.ah_attr.named["gr"].named["hop_limit"] == 64
    assert (path.ah_attr.named["sl"], path.ah_attr.named["port_num"], path.port_num) == (3, 1, 1)
    assert path.ah_attr.named["gr"].named["dgid"] == "0000:0000:0000:0000:0000:ffff:0a4d:0002"
    queue.close()
    device.close()


def test_gids_are_written_in_eight_groups_as_pyverbs_reads_them() -> None:
    """Whatever the version of Python: from 3.13 on, ``ipaddress`` writes those of IPv4 with dots."""
    mapped = bytes(10) + b"\xff\xff\x0a\x4d\x00\x02"
    assert gid_text(mapped) == "0000:0000:0000:0000:0000:ffff:0a4d:0002"
    assert gid_text(bytes(range(16))) == "0001:0203:0405:0607:0809:0a0b:0c0d:0e0f"


def test_a_pyverbs_that_is_missing_or_strange_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs.load.cache_clear()
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(ConfigError, match="pyverbs is not installed") as caught:
        verbs.load()
    assert "python3-pyverbs" in caught.value.hint
    strange = ModuleType("pyverbs")
    strange.__path__ = []
    monkeypatch.setitem(sys.modules, "pyverbs", strange)
    for name in ("device", "pd", "cq", "mr", "qp", "wr", "addr"):
        monkeypatch.setitem(sys.modules, f"pyverbs.{name}", ModuleType(f"pyverbs.{name}"))
    with pytest.raises(ConfigError, match=r"pyverbs is installed but cannot be used: neither of pyverbs\.enums"):
        verbs.load()
    verbs.load.cache_clear()


@pytest.mark.parametrize(
    "name", ["device.Context", "pd.PD", "cq.CompChannel", "qp.QPAttr", "wr.SendWR", "addr.GID", "enums.IBV_WR_SEND"]
)
def test_a_pyverbs_that_lacks_something_is_refused_as_one_that_is_not_known(
    fake_pyverbs: verbs.PyverbsVerbs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs.load.cache_clear()
    module, _, thing = name.partition(".")
    monkeypatch.delattr(getattr(fake_pyverbs._modules, module), thing)
    with pytest.raises(ConfigError, match=rf"version that is not known here: {module}\.{thing} is not there") as caught:
        verbs.load()
    assert "or set the transport to tcp" in caught.value.hint
    verbs.load.cache_clear()


@pytest.mark.parametrize("error", [AttributeError("no such attribute"), TypeError("an unexpected argument")])
def test_a_pyverbs_that_works_otherwise_is_a_device_with_a_problem(
    fake_pyverbs: verbs.PyverbsVerbs, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def otherwise(self: object) -> None:
        raise error

    monkeypatch.setattr(_Context, "query_device", otherwise)
    (found,) = fake_pyverbs.devices()
    assert found.problem == f"RDMA device rxe0: this version of pyverbs is not known here ({error})"


def test_nothing_imports_pyverbs_where_rdma_is_not_used() -> None:
    code = (
        "import sys, allreduced.daemon.agent, allreduced.transports.rdma.transport as t;"
        "t.AutoTransport(); print(any(name.startswith('pyverbs') for name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout.strip() == "False"
    assert importlib.import_module("allreduced.transports.rdma.verbs") is verbs
