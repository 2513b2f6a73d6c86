"""Real agents under mutual TLS: they reduce, take new certificates, and refuse whoever does not belong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from tests.contract.conftest import Recorder
from tests.integration.agents import AgentProcess, NotStarted, StartAgent
from tests.integration.test_agent import BOUND, group
from tests.integration.test_attach_again import agent_pid
from tests.integration.test_links import until_logged
from tests.integration.test_metrics import refusals, scrape
from tests.support.certificates import TestAuthority, environment

from allreduced.client import AsyncCommunicator
from allreduced.core.errors import AgentUnavailable, AllReducedError, AuthenticationError, ConfigError
from allreduced.daemon.certificate_files import CertificateFiles
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Credentials, LinkOptions
from allreduced.transports.tcp import TcpTransport
from allreduced.transports.tcp.tls import TlsStream

SECRET = "of this cluster"


@dataclass
class Cluster:
    """Two agents under TLS that list each other; they have a secret, too."""

    authority: TestAuthority
    agents: list[AgentProcess]

    @property
    def address(self) -> str:
        """Where the first agent listens."""
        return self.agents[0].listen


def start_cluster(
    start_agent: StartAgent, folder: Path, *, secret: str = SECRET, metrics: str = "", **more: str
) -> Cluster:
    """Start the agents ``a`` and ``b``. ``metrics``: where ``a`` serves its metrics."""
    authority = TestAuthority.make(folder / "ours")
    settings = {"ALLREDUCED_SECRET": secret, **more} if secret else more
    first = start_agent(
        "a",
        *("--listen", "tcp://127.0.0.1:0", "--peer", "b=tcp://127.0.0.1:1", "--peer", "c=tcp://127.0.0.1:2"),
        **environment(authority.issue("a")),
        ALLREDUCED_METRICS_LISTEN=metrics,
        **settings,
    )
    second = start_agent(
        "b",
        *("--listen", "tcp://127.0.0.1:0", "--peer", f"a={first.listen}"),
        **environment(authority.issue("b")),
        **settings,
    )
    return Cluster(authority, [first, second])


async def assert_sums(ranks: Sequence[AsyncCommunicator], count: int) -> None:
    """Reduce once and check every element on every rank."""
    inputs = [np.arange(count, dtype="int64") * (rank + 1) - rank for rank in range(len(ranks))]
    results = await asyncio.gather(*(rank.all_reduce(x) for rank, x in zip(ranks, inputs, strict=True)))
    for result in results:
        assert np.array_equal(result, sum(inputs[1:], inputs[0]))


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with-secret", "certificates-only"])
async def test_two_agents_of_two_ranks_reduce(start_agent: StartAgent, tmp_path: Path, secret: str) -> None:
    cluster = start_cluster(start_agent, tmp_path, secret=secret)
    async with asyncio.timeout(BOUND), group(cluster.agents, 4) as ranks:
        assert [rank.nodes for rank in ranks] == [("a", "b")] * 4
        for count in (0, 1, 5, 1000, 300_001, 3_000_017):
            await assert_sums(ranks, count)
        floats = [np.random.default_rng(rank).standard_normal(1_000_003).astype("float32") for rank in range(4)]
        means = await asyncio.gather(*(rank.all_reduce(x, op="mean") for rank, x in zip(ranks, floats, strict=True)))
        np.testing.assert_allclose(means[0], np.mean(np.stack(floats, dtype="float64"), axis=0), atol=1e-6)
        assert all(mean.tobytes() == means[0].tobytes() for mean in means)
    assert [agent.stop() for agent in cluster.agents] == [0, 0]
    assert cluster.agents[1].logged() == ""


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[None]:
    """Let a group reduce without end meanwhile, and check all results."""
    async with asyncio.timeout(3 * BOUND), group(cluster.agents, 4) as ranks:
        stopped = False

        async def stream() -> int:
            operations = 0
            while not stopped or not operations:
                await assert_sums(ranks, 100_003)
                operations += 1
            return operations

        work = asyncio.ensure_future(stream())
        try:
            yield
        finally:
            stopped = True
            assert await work > 0


async def refused(address: str, node: str, credentials: Credentials | None, *, secret: str = SECRET) -> AllReducedError:
    """Dial like the agent ``node`` and return why that failed."""
    authenticator = SecretAuthenticator(node, 77, secret.encode(), encrypted=credentials is not None)
    with pytest.raises(AllReducedError) as caught:
        await TcpTransport().connect(address, Recorder(), LinkOptions(authenticator, credentials=credentials))
    return caught.value


class Unchecked(Credentials):
    """Credentials that no agent would take for its own."""

    def __init__(self, files: CertificateFiles, trusted: CertificateFiles | None = None) -> None:
        self._files = files
        self._trusted = trusted or files

    def context(self, *, listening: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.load_verify_locations(self._trusted.ca)
        context.load_cert_chain(self._files.certificate, self._files.key)
        return context


async def test_strange_agents_are_refused_and_nobody_is_harmed(
    start_agent: StartAgent, tmp_path: Path, free_port: int
) -> None:
    cluster = start_cluster(start_agent, tmp_path, metrics=str(free_port))
    ours, theirs = cluster.authority, TestAuthority.make(tmp_path / "theirs")
    victim = cluster.agents[0]
    strangers: list[tuple[str, str, Callable[[], Credentials | None], str, str]] = [
        ("no credentials", "c", lambda: None, SECRET, "does not use TLS"),
        ("expired", "c", lambda: Unchecked(ours.issue("c", days=-1)), SECRET, "expired"),
        ("not yet", "c", lambda: Unchecked(ours.issue("c", begins_in=timedelta(days=5))), SECRET, "not valid yet"),
        ("another authority", "c", lambda: Unchecked(theirs.issue("c"), ours.issue("c")), SECRET, "not signed by"),
        ("wrong name", "c", lambda: ours.credentials("d"), SECRET, "calls itself 'c', and its certificate is for d"),
        ("not listed", "d", lambda: ours.credentials("d"), SECRET, "'d' is not in the list"),
        ("another secret", "c", lambda: ours.credentials("c"), "of another cluster", "another secret"),
        ("no secret", "c", lambda: ours.credentials("c"), "", "uses no secret"),
    ]
    async with running(cluster):
        for what, node, make, secret, says in strangers:
            credentials = make()
            before = victim.logged().count("event=connection_dropped")
            error = await refused(cluster.address, node, credentials, secret=secret)
            assert isinstance(error, AuthenticationError), (what, error)
            await until_logged(victim, says)
            await refused(cluster.address, node, credentials, secret=secret)
            assert victim.logged().count("event=connection_dropped") == before + 1, (what, victim.logged())
    # Each of them came twice, and each time counts.
    samples = await asyncio.to_thread(scrape, free_port)
    assert refusals(samples, "peers") == {"tls": 2 * 6, "secret": 2 * 2}
    assert "event=peer_lost" not in victim.logged()
    assert [agent.stop() for agent in cluster.agents] == [0, 0]


@asynccontextmanager
async def recording(address: str) -> AsyncIterator[tuple[str, list[bytearray]]]:
    """Relay connections to an agent: yield where, and what each dialler sent."""
    host, port = address.removeprefix("tcp://").split(":")
    recorded: list[bytearray] = []
    relays: list[asyncio.Task[None] | None] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.current_task())
        bytes_of = bytearray()
        recorded.append(bytes_of)
        other_reader, other = await asyncio.open_connection(host, int(port))

        # Closed with something unread a side would be reset, and the agent would say so instead of what it is to say.
        async def back() -> None:
            try:
                while data := await other_reader.read(65536):
                    writer.write(data)
            finally:
                writer.write_eof()

        async def forth() -> None:
            try:
                while data := await reader.read(65536):
                    bytes_of.extend(data)
                    other.write(data)
            finally:
                other.write_eof()

        await asyncio.gather(back(), forth(), return_exceptions=True)
        for end in (writer, other):
            end.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", recorded
    finally:
        server.close()
        await asyncio.gather(*filter(None, relays))
        await server.wait_closed()


async def replay(address: str, session: bytes) -> bytes:
    """Send what was recorded, and return the answer, which is of no use to a recording."""
    host, port = address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(session)
        while data := await reader.read(65536):
            answer += data
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("encrypted", "says"),
    [
        (True, ("decryption failed or bad record mac",) * 2),
        (False, ("another secret", "a data flow of a link that is not being made here")),
    ],
    ids=["mtls", "secret-only"],
)
async def test_a_recorded_session_is_refused_with_one_line_each(
    start_agent: StartAgent, tmp_path: Path, encrypted: bool, says: tuple[str, str]
) -> None:
    if encrypted:
        cluster = start_cluster(start_agent, tmp_path)
    else:
        first = start_agent("a", "--listen", "tcp://127.0.0.1:0", ALLREDUCED_SECRET=SECRET)
        second = start_agent(
            "b", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={first.listen}", ALLREDUCED_SECRET=SECRET
        )
        cluster = Cluster(TestAuthority.make(tmp_path), [first, second])
    victim = cluster.agents[0]
    credentials = cluster.authority.credentials("c") if encrypted else None
    authenticator = SecretAuthenticator("c", 5, SECRET.encode(), encrypted=encrypted)
    async with recording(cluster.address) as (address, recorded):
        options = LinkOptions(authenticator, credentials=credentials, flows=1)
        link = await TcpTransport().connect(address, Recorder(), options)
        await link.close(BOUND)
    assert len(recorded) == 2  # the control flow and the data flow
    async with running(cluster):
        for times, session in enumerate(recorded, 1):
            await replay(cluster.address, bytes(session))
            await until_logged(victim, "event=connection_dropped", times)
    assert [agent.stop() for agent in cluster.agents] == [0, 0]
    lines = victim.logged().splitlines()
    assert len(lines) == 3, lines
    assert "event=link_lost peer=c reason='it closed the link without a goodbye'" in lines[0]  # the recorded session
    for line, reason in zip(lines[1:], says, strict=True):
        assert "event=connection_dropped from=tcp://127.0.0.1:" in line
        assert reason in line


async def test_an_agent_without_tls_and_one_with_it_say_so_on_both_sides(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    cluster = start_cluster(start_agent, tmp_path)
    plain = start_agent(
        "c", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={cluster.address}", ALLREDUCED_SECRET=SECRET
    )
    await until_logged(plain, "the peer uses TLS, this agent does not")
    await until_logged(cluster.agents[0], "does not use TLS, this agent does")
    other = start_agent(
        "d", "--peer", f"c={plain.listen}", **environment(cluster.authority.issue("d")), ALLREDUCED_SECRET=SECRET
    )
    await until_logged(other, "the peer does not speak TLS 1.3, this agent does")
    await until_logged(plain, "the peer uses TLS, this agent does not", 2)
    assert [agent.stop() for agent in (other, plain, *cluster.agents)] == [0, 0, 0, 0]


async def test_new_certificates_are_taken_without_a_restart(start_agent: StartAgent, tmp_path: Path) -> None:
    settings = tmp_path / "agent.toml"
    authority = TestAuthority.make(tmp_path / "ours")
    files = authority.issue("a")
    settings.write_text(
        f'[security]\nmode = "mtls"\nca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    )
    first = start_agent("a", "--config", str(settings), "--listen", "tcp://127.0.0.1:0")
    second = start_agent(
        "b", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={first.listen}", **environment(authority.issue("b"))
    )
    async with asyncio.timeout(BOUND), group([first, second], 2) as ranks:
        await assert_sums(ranks, 1000)
        # A broken file keeps the old one in force.
        good = _spoil(files.certificate)
        first.process.send_signal(signal.SIGHUP)
        await until_logged(first, "event=reload_failed in_force=old")
        assert await serial_of(first.listen, authority) == good_serial(good)
        # Both of another authority, and both authorities are known meanwhile.
        successor = TestAuthority.make(tmp_path / "next")
        successor.issue("a")
        for name in ("a.pem", "a.key"):
            shutil.copy(successor.folder / name, authority.folder / name)
        (authority.folder / "ca.pem").write_bytes(authority.issued.certificate + successor.issued.certificate)
        first.process.send_signal(signal.SIGHUP)
        await until_logged(first, "event=certificate_changed")
        assert await serial_of(first.listen, authority) == good_serial((successor.folder / "a.pem").read_bytes())
        await assert_sums(ranks, 1000)
    assert "event=link_lost" not in first.logged()
    assert [first.stop(), second.stop()] == [0, 0]


async def test_new_certificates_are_found_without_a_signal(start_agent: StartAgent, tmp_path: Path) -> None:
    """The agent looks every 10 s. First come files that do not belong together, as while they are being copied."""
    authority = TestAuthority.make(tmp_path / "ours")
    agent = start_agent("a", "--listen", "tcp://127.0.0.1:0", **environment(authority.issue("a")))
    first = (authority.folder / "a.pem").read_bytes()
    other = TestAuthority.make(tmp_path / "next")
    other.issue("a")
    (authority.folder / "a.pem").write_bytes((other.folder / "a.pem").read_bytes())
    async with asyncio.timeout(BOUND):
        await until_logged(agent, "event=certificate_not_taken in_force=old")
        assert await serial_of(agent.listen, authority) == good_serial(first)
        shutil.copy(other.folder / "a.key", authority.folder / "a.key")
        (authority.folder / "ca.pem").write_bytes(authority.issued.certificate + other.issued.certificate)
        await until_logged(agent, "event=certificate_changed")
        found = await serial_of(agent.listen, authority)
        assert found == good_serial((other.folder / "a.pem").read_bytes()) != good_serial(first)
    assert agent.stop() == 0


async def test_a_node_that_is_taken_out_of_the_list_is_shut_out_by_a_reload(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    settings = tmp_path / "agent.toml"
    authority = TestAuthority.make(tmp_path / "ours")
    files = authority.issue("a")

    def allow(node: str) -> None:
        settings.write_text(
            f'[security]\nmode = "mtls"\nca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
            f'[peers]\nlisten = "tcp://127.0.0.1:0"\n[[peers.static]]\nnode = "{node}"\naddress = "tcp://127.0.0.1:1"\n'
        )

    allow("b")
    agent = start_agent("a", "--config", str(settings))
    recorder = Recorder()
    link = await TcpTransport().connect(
        agent.listen,
        recorder,
        LinkOptions(SecretAuthenticator("b", 77, b"", encrypted=True), credentials=authority.credentials("b")),
    )
    allow("c")
    agent.process.send_signal(signal.SIGHUP)
    await until_logged(agent, "event=setting_changed setting=peers.static")
    error = await refused(agent.listen, "b", authority.credentials("b"), secret="")
    assert "'b' is not in the peer's list" in error.message
    assert recorder.ends == []  # a link that is open lives on
    link.abort(AgentUnavailable("the test is over"))
    await recorder.until_closed()
    assert agent.stop() == 0


def _spoil(path: str) -> bytes:
    """Write something else into a file and return what was in it."""
    file = Path(path)
    data = file.read_bytes()
    file.write_text("no certificate")
    return data


def good_serial(certificate: bytes) -> str:
    return f"{x509.load_pem_x509_certificate(certificate).serial_number:X}"


async def serial_of(address: str, authority: TestAuthority) -> str:
    """Return the serial number of the certificate that an agent shows now."""
    host, port = address.removeprefix("tcp://").split(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    credentials = authority.credentials("x")
    stream = TlsStream(sock, credentials.context(listening=False), listening=False)
    try:
        await stream.handshake()
        certificate = stream.certificate()
        assert certificate is not None
        return str(certificate["serialNumber"]).lstrip("0")
    finally:
        stream.close(reset=False)


async def test_a_private_agent_needs_the_name_of_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, setting in environment(TestAuthority.make(tmp_path).issue("a")).items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def connected() -> AsyncCommunicator:
        job = f"mtls-{secrets.token_hex(6)}"
        return await AsyncCommunicator.connect(job=job, rank=0, size=1, local_rank=0, local_size=1, deadline=BOUND)

    with pytest.raises(
        AuthenticationError, match=f"is for a, and this agent is called '{socket.gethostname()}'"
    ) as caught:
        await connected()
    assert "ALLREDUCED_AGENT_NODE" in caught.value.hint
    monkeypatch.setenv("ALLREDUCED_AGENT_NODE", "a")
    rank = await connected()
    assert (await rank.all_reduce(np.ones(3))).tolist() == [1.0] * 3
    assert rank.nodes == ("a",)
    agent = agent_pid(rank)
    await rank.close()
    await asyncio.to_thread(os.waitpid, agent, 0)


def test_credentials_that_cannot_be_used_stop_the_start(start_agent: StartAgent, tmp_path: Path) -> None:
    authority = TestAuthority.make(tmp_path)
    files = authority.issue("a")
    Path(files.key).chmod(0o644)
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--listen", "tcp://127.0.0.1:0", **environment(files))
    assert isinstance(caught.value.error, AuthenticationError)
    assert caught.value.error.hint == f"chmod 600 {files.key}"
    with pytest.raises(NotStarted) as caught:
        start_agent("b", "--listen", "tcp://127.0.0.1:0", **environment(authority.issue("a")))
    assert "is for a, and this agent is called 'b'" in str(caught.value.error)
    with pytest.raises(NotStarted) as caught:
        start_agent("a", ALLREDUCED_SECURITY_MODE="mtls")
    assert isinstance(caught.value.error, ConfigError)
    assert caught.value.error.path == "security.ca"
