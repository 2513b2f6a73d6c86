"""All settings of an agent: one typed schema. ``settings_reader`` fills it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from allreduced.core.errors import ConfigError
from allreduced.daemon.private_file import check_private, reading_hint
from allreduced.daemon.sizes import size_text
from allreduced.daemon.timing import LONGEST, SHORTEST, Timing, derived
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.patience import Patience, patience

SYSTEM_SOCKET = "/run/allreduced/agent.sock"
DEFAULT_PORT = 4123

CONFIG_VERSION = 1
"""What ``version`` at the top of a file may be at most. It grows when a key changes its meaning or goes away."""

_SIZE = {"unit": "bytes"}

Size: TypeAlias = Annotated[int, Meta(extra=_SIZE)]
"""A number of bytes, or text such as ``512MiB``."""
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Agent(Section, frozen=True):
    """Who and where this agent is."""

    node: Annotated[str, Meta(max_length=255, description="unique name of this node; empty: its host name")] = ""
    socket: Annotated[str, Meta(description="path, or @name, of the clients' socket; empty: the usual place")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "warning"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="lines of key=value, or an object of JSON each")
    ] = "text"
    loop: Annotated[Literal["auto", "uvloop", "asyncio"], Meta(description="event loop; auto: asyncio's")] = "auto"


class StaticPeer(Section, frozen=True):
    """One agent of a static list."""

    node: Annotated[str, Meta(min_length=1, max_length=255)]
    address: str


class Peers(Section, frozen=True):
    """Where other agents are, and where this one is for them."""

    listen: Annotated[str, Meta(description="scheme://host:port to listen at; empty: only where there are peers")] = ""
    advertise: Annotated[
        str, Meta(description="scheme://host:port that others dial; empty: as listened at, or on the way to a peer")
    ] = ""
    static: Annotated[tuple[StaticPeer, ...], Meta(description="agents to dial, as node=address in a variable")] = ()
    dns: Annotated[
        str,
        Meta(description="name:port whose addresses are agents, or the name of a service (SRV); looked up for ever"),
    ] = ""
    dns_interval: Annotated[float, Meta(ge=0.1, le=3600, description="seconds between lookups")] = 10.0
    flows: Annotated[int, Meta(ge=1, le=64, description="data connections per link")] = 2
    transport: Annotated[
        Literal["auto", "tcp", "rdma"],
        Meta(description="what carries data; auto: on each link RDMA if both ends can, else TCP"),
    ] = "auto"


class Security(Section, frozen=True):
    """Who may be a peer. With ``mode = "mtls"`` a secret may be given, too."""

    mode: Annotated[
        Literal["secret", "mtls"],
        Meta(description="secret: links are authenticated by it; mtls: and encrypted, by TLS 1.3 with certificates"),
    ] = "secret"
    ca: Annotated[str, Meta(description="mtls: file with the authorities that sign the certificates of all nodes")] = ""
    certificate: Annotated[str, Meta(description="mtls: file with this node's certificate; one name is agent.node")] = (
        ""
    )
    key: Annotated[str, Meta(description="mtls: file with its key, which others must not be able to read")] = ""
    secret: Annotated[str, Meta(description="shared by all agents")] = ""
    secret_file: Annotated[str, Meta(description="file with the secret, which others must not be able to read")] = ""
    insecure: Annotated[bool, Meta(description="allow peers on other machines without a secret")] = False


class Access(Section, frozen=True):
    """Which processes of this node may attach. The user that the agent runs as always may; root may always look."""

    users: Annotated[
        tuple[str, ...], Meta(description="further users who may attach, by name or uid; *: everybody")
    ] = ()
    groups: Annotated[tuple[str, ...], Meta(description="groups whose members may attach, by name or gid")] = ()
    socket_mode: Annotated[
        str,
        Meta(
            pattern="^(0?[0-7]{3})?$",
            description="octal permissions of the socket; empty: 0600, 0660 with socket_group, 0666 where others may",
        ),
    ] = ""
    socket_group: Annotated[str, Meta(description="group of the socket, by name or gid; empty: the agent's own")] = ""
    job_secrets: Annotated[
        Literal["optional", "required"], Meta(description="whether every rank that joins must give a job secret")
    ] = "optional"


class Engine(Section, frozen=True):
    """How tensors are reduced."""

    threads: Annotated[int, Meta(ge=0, le=1024, description="reduction threads; 0: by the number of CPUs, up to 4")] = 0
    cpus: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1 << 16)], ...], Meta(description="CPUs that they are bound to; empty: any")
    ] = ()
    nice: Annotated[int, Meta(ge=-20, le=19, description="their niceness")] = 0
    tile_bytes: Annotated[Size, Meta(description="unit of reducing and sending: a power of two, 256KiB to 4MiB")] = (
        2 << 20
    )
    window_tiles: Annotated[int, Meta(ge=1, le=1024, description="tiles that a peer may send ahead")] = 4


class Limits(Section, frozen=True):
    """What clients may take; times in seconds."""

    arena_bytes: Annotated[Size, Meta(ge=0, description="all shared memory; 0: a share of the machine's")] = 0
    arena_bytes_per_client: Annotated[
        Size, Meta(ge=0, description="inputs of one client; 0: what all inputs may take")
    ] = 0
    arena_bytes_per_user: Annotated[
        Size,
        Meta(ge=0, description="inputs of all processes of one user, and as much for their results; 0: no such limit"),
    ] = 0
    arenas_per_client: Annotated[Count, Meta(description="pieces of shared memory that one client's inputs are in")] = (
        1024
    )
    clients: Annotated[Count, Meta(description="connected clients")] = 1024
    clients_per_user: Annotated[Count, Meta(description="connected clients of one user")] = 1024
    requests: Annotated[Count, Meta(description="requests in flight of one client")] = 4096
    requests_per_user: Annotated[Count, Meta(description="requests in flight of one user's clients")] = 1 << 16
    groups: Annotated[Count, Meta(description="groups that one client has, or waits for, a rank in")] = 256
    groups_per_user: Annotated[Count, Meta(description="the same, of all clients of one user together")] = 2048
    streams: Annotated[
        Count, Meta(description="large tensors of one client that travel inside messages at the same time")
    ] = 1024
    operations: Annotated[Count, Meta(description="operations in flight of one group")] = 4096
    names: Annotated[Count, Meta(description="different names of operations in use in one group")] = 1 << 20
    inline: Annotated[Size, Meta(ge=1, le=64 << 10, description="bytes of a tensor that travels in messages")] = 8 << 10
    inline_bytes: Annotated[
        Size, Meta(ge=1, description="all small inputs in flight; one user leaves a quarter to others")
    ] = 96 << 20
    lease_bytes: Annotated[Size, Meta(ge=1, description="results that one client may hold on to")] = 1 << 30
    leases: Annotated[Count, Meta(description="the same, in number")] = 4096
    outgoing_bytes: Annotated[Size, Meta(ge=1 << 20, description="what waits for a client that does not read")] = (
        64 << 20
    )
    outgoing_messages: Annotated[Count, Meta(description="the same, in number")] = 1 << 16
    hello_timeout: Annotated[Seconds, Meta(description="seconds in which a new connection must say who it is")] = 5.0
    pending_handshakes: Annotated[Count, Meta(description="connections of strangers at once")] = 64
    peers: Annotated[Count, Meta(description="other agents that there are links to")] = 4096


class Failure(Section, frozen=True):
    """When something is given up; in seconds. What else is needed is derived from ``failure_timeout``."""

    failure_timeout: Annotated[
        float, Meta(ge=SHORTEST, le=LONGEST, description="seconds until a silent peer is dead")
    ] = 5.0
    deadline: Annotated[
        Seconds, Meta(description="seconds until an operation is given up, where neither call nor connect() says")
    ] = 300.0


class Metrics(Section, frozen=True):
    """Metrics for Prometheus and the agent's health, over HTTP: ``/metrics``, ``/healthz``, ``/readyz``."""

    listen: Annotated[
        str, Meta(description="host:port, or a port alone for the loopback interface; empty: nothing is served")
    ] = ""
    hosts: Annotated[
        tuple[str, ...], Meta(description="host names that requests may use, besides loopback's and the address itself")
    ] = ()
    groups: Annotated[
        int, Meta(ge=0, le=1024, description="groups that have series of their own, with the names of job and group")
    ] = 32


class Rdma(Section, frozen=True):
    """Data over RDMA, where ``peers.transport`` allows it. Control frames and authentication stay on TCP."""

    device: Annotated[
        str, Meta(max_length=64, description="such as mlx5_0; empty: the one with the address that reaches the peer")
    ] = ""
    port: Annotated[int, Meta(ge=0, le=255, description="port of the device; 0: the one that fits")] = 0
    gid_index: Annotated[int, Meta(ge=-1, le=65535, description="entry of its GID table; -1: the one that fits")] = -1
    mtu: Annotated[
        Literal[0, 256, 512, 1024, 2048, 4096],
        Meta(description="path MTU in bytes, which both ports must allow; 0: the lower one of both"),
    ] = 0
    traffic_class: Annotated[int, Meta(ge=0, le=255, description="of all packets; RoCE v2: DSCP × 4")] = 0
    service_level: Annotated[int, Meta(ge=0, le=15, description="of all packets; RoCE: the priority in VLAN tags")] = 0
    hop_limit: Annotated[int, Meta(ge=1, le=255, description="routers on the way at most")] = 64
    timeout: Annotated[
        int, Meta(ge=0, le=31, description="4.096 µs × 2^timeout for an acknowledgement; 0: from failure_timeout")
    ] = 0
    retry_count: Annotated[
        int, Meta(ge=-1, le=7, description="tries after a missing acknowledgement; -1: from failure_timeout")
    ] = -1
    rnr_retry_count: Annotated[
        int, Meta(ge=0, le=6, description="tries at a peer without buffers; 7, for ever, is not allowed")
    ] = 6
    rdma_plaintext: Annotated[
        bool, Meta(description="use RDMA also under mutual TLS, though RDMA data is not encrypted")
    ] = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be configured."""

    agent: Agent = Agent()
    peers: Peers = Peers()
    security: Security = Security()
    access: Access = Access()
    rdma: Rdma = Rdma()
    engine: Engine = Engine()
    limits: Limits = Limits()
    failure: Failure = Failure()
    metrics: Metrics = Metrics()

    @property
    def timing(self) -> Timing:
        """The times of failure handling that follow from these settings.

        :raises ConfigError: they contradict each other.
        """
        return derived(self.failure.failure_timeout, self.failure.deadline)

    @property
    def rdma_patience(self) -> Patience:
        """How long queue pairs try; retries are exhausted within ``failure_timeout``.

        :raises ConfigError: the times contradict each other.
        """
        timeout, retry_count = self.rdma.timeout, self.rdma.retry_count
        return patience(
            self.failure.failure_timeout,
            timeout=timeout or None,
            retry_count=None if retry_count < 0 else retry_count,
        )

    @property
    def rdma_options(self) -> RdmaOptions:
        """What RDMA links are made with.

        :raises ConfigError: as ``rdma_patience``.
        """
        rdma, chosen = self.rdma, self.rdma_patience
        return RdmaOptions(
            device=rdma.device,
            port=rdma.port,
            gid_index=rdma.gid_index,
            mtu=rdma.mtu,
            traffic_class=rdma.traffic_class,
            service_level=rdma.service_level,
            hop_limit=rdma.hop_limit,
            timeout=chosen.timeout,
            retry_count=chosen.retry_count,
            rnr_retry=rdma.rnr_retry_count,
            plaintext=rdma.rdma_plaintext,
        )

    @property
    def drain_timeout(self) -> float:
        """Seconds that operations in flight may take to end when the agent is asked to stop."""
        return 2 * self.failure.failure_timeout

    def describe(self) -> str:
        """Return the settings as TOML; a secret is masked."""
        lines: list[str] = [f"version = {CONFIG_VERSION}"]
        for name in self.__struct_fields__:
            section = getattr(self, name)
            hints = get_type_hints(type(section), include_extras=True)
            tables: list[StaticPeer] = []
            lines += ["", f"[{name}]"]
            for key in section.__struct_fields__:
                value = getattr(section, key)
                if key == "secret" and value:
                    value = "********"
                if key == "static":
                    tables = list(value)
                else:
                    lines.append(f"{key} = {_toml(value, size=is_size(hints[key]))}")
            for peer in tables:
                lines += ["", f"[[{name}.static]]", f"node = {_toml(peer.node)}", f"address = {_toml(peer.address)}"]
        return "\n".join(lines) + "\n"


SECTIONS: Final[dict[str, type[Section]]] = {
    "agent": Agent,
    "peers": Peers,
    "security": Security,
    "access": Access,
    "rdma": Rdma,
    "engine": Engine,
    "limits": Limits,
    "failure": Failure,
    "metrics": Metrics,
}
"""The sections by name."""


def secret_bytes(settings: Settings) -> bytes:
    """Return the shared secret, out of its file if there is one; empty where there is none.

    :raises ConfigError: the file cannot be read, is empty, or both settings are given.
    :raises AuthenticationError: others may use the file.
    """
    security = settings.security
    if not security.secret_file:
        return security.secret.encode()
    where = "security.secret_file"
    if security.secret:
        raise ConfigError("both security.secret and security.secret_file are given", path=where, hint="give one")
    path = Path(security.secret_file)
    try:
        # A pipe that nobody writes to must not hold up the start.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            check_private("the secret file", path, file.fileno())
            secret = (file.read(4096) or b"").strip()
    except OSError as error:
        hint = reading_hint(path, error)
        raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}", path=where, hint=hint) from error
    if not secret:
        raise ConfigError(f"the secret file {path} is empty", path=where)
    return secret


def default_socket(environ: Mapping[str, str]) -> str:
    """Return the usual place of the clients' socket: the user's runtime directory, else the system's."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime.rstrip('/')}/allreduced/agent.sock" if runtime.startswith("/") else SYSTEM_SOCKET


def metas_of(hint: object) -> list[Meta]:
    """Return what is said about a field's type."""
    found = [argument for argument in get_args(hint)[1:] if isinstance(argument, Meta)]
    return found if get_origin(hint) is Annotated else []


def is_size(hint: object) -> bool:
    """Return whether a field is a number of bytes."""
    return any(meta.extra == _SIZE for meta in metas_of(hint))


def _toml(value: object, *, size: bool = False) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f'"{size_text(value)}"' if size and value and value % 1024 == 0 else str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)
