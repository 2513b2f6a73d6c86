"""What the doctor says about facts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificates import TestAuthority
from tests.support.other_user import STRANGER, as_user, only_root
from tests.support.reports import REPORT, agent

from allreduced.cli import doctor
from allreduced.cli.doctor import as_json, lines
from allreduced.cli.main import main
from allreduced.client import environment, inquiry
from allreduced.client.inquiry import ClusterStatus
from allreduced.core.errors import AgentUnavailable, AuthenticationError, ConfigError
from allreduced.daemon.certificate_end import End, Role
from allreduced.daemon.certificate_files import CertificateFiles
from allreduced.daemon.doctor import examination, network
from allreduced.daemon.doctor.check import Check, finish
from allreduced.daemon.doctor.cluster import Way, judge_cluster, ways
from allreduced.daemon.doctor.examination import Examination, Told, examine, judge_settings
from allreduced.daemon.doctor.finding import Finding, Level, note, ok, problem, warning, worst
from allreduced.daemon.doctor.local_socket import SocketFacts, judge_socket, socket_facts
from allreduced.daemon.doctor.machine import MachineFacts, judge_machine
from allreduced.daemon.doctor.network import (
    Interface,
    NameFacts,
    NetworkFacts,
    PeerFacts,
    at_once,
    interface_facts,
    judge_network,
    judge_peer,
    network_facts,
)
from allreduced.daemon.doctor.security import judge_expiry, judge_security, security_facts
from allreduced.daemon.reach import Dialled
from allreduced.daemon.settings import Access, Agent, Peers, Security, Settings, StaticPeer
from allreduced.daemon.socket_path import bind_socket
from allreduced.daemon.start_check import refusals
from allreduced.daemon.status import PROBE
from allreduced.protocol.status import AgentReport, PeerReport, ReachReport, UnansweredReport

GIB = 1 << 30
GOOD = MachineFacts(
    descriptors=(1024, 1 << 20),
    arena_error="",
    kernels="avx2",
    kernels_error="",
    arenas=8 * GIB,
    control_group=16 * GIB,
    available=12 * GIB,
    cpus=8,
    threads=4,
    overcommit="0",
)


def bad(findings: list[Finding]) -> list[tuple[str, Level]]:
    return [(one.subject, one.level) for one in findings if one.level in (Level.WARNING, Level.PROBLEM)]


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = list(judge_machine(GOOD))
    assert bad(found) == []
    assert [one.subject for one in found] == ["shared memory", "descriptors", "memory", "kernels", "processors"]
    assert all(not one.mend for one in found)


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        (replace(GOOD, arena_error="no seals"), ("shared memory", Level.PROBLEM), "memfd_create"),
        (replace(GOOD, descriptors=(1024, 1024)), ("descriptors", Level.WARNING), "LimitNOFILE"),
        (replace(GOOD, arenas=16 * GIB), ("memory", Level.PROBLEM), "limits.arena_bytes to 8GiB"),
        (replace(GOOD, arenas=14 * GIB), ("memory", Level.WARNING), "limits.arena_bytes"),
        (replace(GOOD, available=GIB), ("memory", Level.WARNING), "free memory"),
        (replace(GOOD, kernels="", kernels_error="no such file"), ("kernels", Level.PROBLEM), "pip install"),
        (replace(GOOD, threads=9), ("processors", Level.WARNING), "engine.threads to 8"),
        (replace(GOOD, cpus=1, threads=1), ("processors", Level.WARNING), "CPUAffinity"),
    ],
)
def test_each_lack_of_a_machine_is_told_with_what_mends_it(
    facts: MachineFacts, wanted: tuple[str, Level], words: str
) -> None:
    found = list(judge_machine(facts))
    assert bad(found) == [wanted]
    assert words in next(one.mend for one in found if (one.subject, one.level) == wanted)


def test_a_kernel_that_does_not_overcommit_is_a_note() -> None:
    (found,) = [one for one in judge_machine(replace(GOOD, overcommit="2")) if one.level is Level.NOTE]
    assert (found.subject, found.mend.startswith("sysctl -w vm.overcommit_memory=0")) == ("memory", True)


def test_no_limit_on_descriptors_is_well() -> None:
    assert bad(list(judge_machine(replace(GOOD, descriptors=(1024, None))))) == []


SOCKET = SocketFacts("/run/allreduced/agent.sock", "socket", 0, 0o660, 999, 998)


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (SOCKET, Level.OK, "mode 660, uid 999, gid 998"),
        (replace(SOCKET, kind="abstract", name="@a"), Level.OK, "answers at @a"),
        (replace(SOCKET, answer=errno.EACCES), Level.PROBLEM, "may not use"),
        (replace(SOCKET, answer=errno.EAGAIN), Level.PROBLEM, "takes no connections"),
        (replace(SOCKET, answer=errno.ECONNREFUSED, folder_uid=999), Level.NOTE, "an agent of uid 999 replaces it"),
        (replace(SOCKET, answer=errno.ECONNREFUSED, asker=999), Level.NOTE, "an agent of uid 999 replaces it"),
        (replace(SOCKET, answer=errno.ECONNREFUSED), Level.WARNING, "one of another user does not start"),
        (replace(SOCKET, answer=errno.ECONNREFUSED, uid=0), Level.WARNING, "an agent of uid 0 replaces it"),
        (replace(SOCKET, answer=errno.ECONNREFUSED, uid=0, folder_uid=999), Level.PROBLEM, "folder is that of uid 999"),
        (replace(SOCKET, kind="other", answer=errno.ECONNREFUSED), Level.PROBLEM, "is not a socket"),
        (replace(SOCKET, kind="hidden", answer=errno.EACCES), Level.PROBLEM, "may not look"),
        (replace(SOCKET, kind="nothing", answer=errno.ENOENT), Level.NOTE, "no agent runs"),
        (replace(SOCKET, kind="no_folder", answer=errno.ENOENT, may_make=False), Level.PROBLEM, "cannot make"),
    ],
)
def test_the_socket(facts: SocketFacts, level: Level, words: str) -> None:
    (found,) = judge_socket(facts)
    assert (found.level, words in found.message) == (level, True), found
    assert bool(found.mend) == (level is not Level.OK)


def test_a_socket_that_others_cannot_replace_is_to_be_removed() -> None:
    (found,) = judge_socket(replace(SOCKET, answer=errno.ECONNREFUSED, uid=0, folder_uid=999))
    assert found.mend.startswith("sudo rm /run/allreduced/agent.sock; then start the agent")


@only_root
def test_a_socket_in_a_folder_that_this_user_may_not_enter(open_folder: Path) -> None:
    closed = open_folder / "closed"
    (closed / "deeper").mkdir(parents=True)
    closed.chmod(0o700)
    for name in (closed / "agent.sock", closed / "deeper" / "agent.sock"):
        with as_user(STRANGER):
            facts = socket_facts(str(name))
        assert (facts.kind, facts.closed) == ("hidden", str(closed))
        (found,) = judge_socket(facts)
        assert found.message == f"this user may not look at {name}: it may not enter {closed}"
        assert found.mend == f"join the group of {closed} (usermod -aG), or name another socket (ALLREDUCED_SOCKET)"


@only_root
def test_settings_of_the_service_that_this_user_may_not_read_are_left_out(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = open_folder / "closed"
    closed.mkdir(0o700)
    config = closed / "agent.toml"
    monkeypatch.setattr(doctor, "SYSTEM_CONFIG", str(config))
    for there in (False, True):
        if there:
            config.write_text("")
        with as_user(STRANGER):
            assert doctor._system_config() is None
        said = f"this user may not read {config}: examined with the settings of the environment only"
        assert said in capsys.readouterr().err
    assert doctor._system_config() == str(config)
    config.unlink()
    assert doctor._system_config() is None
    assert capsys.readouterr().err == ""


@only_root
def test_a_runtime_directory_that_this_user_may_not_enter(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = open_folder / "closed"
    closed.mkdir(0o700)
    monkeypatch.setattr(environment, "SYSTEM_SOCKET", str(open_folder / "none.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(closed / "user"))
    with as_user(STRANGER):
        facts = socket_facts(doctor._usual_socket())
    assert (facts.name, facts.kind, facts.closed) == (f"{closed}/user/allreduced/agent.sock", "hidden", str(closed))


def test_an_agent_that_says_nothing_is_not_waited_for_as_long_as_one_that_asks_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[bool, int, float]] = []
    silent = {False, True}

    def ask_status(address: object, *, path: str, others: bool, timeout: float, probe: int = 0) -> ClusterStatus:
        asked.append((others, probe, timeout))
        if others in silent:
            raise AgentUnavailable(f"the agent at {path} does not answer")
        return ClusterStatus((REPORT,), ())

    def ask(*, others: bool = True) -> Told:
        return doctor._ask("@a", others=others, bandwidth=False, left=lambda: 14.0)

    monkeypatch.setattr(inquiry, "ask_status", ask_status)
    with pytest.raises(AgentUnavailable, match="does not answer"):
        ask()
    assert asked == [(False, 0, 7.0)]
    silent.remove(False)
    told = ask()
    assert told.reports == (REPORT,)
    (found,) = told.findings
    assert (found.subject, found.level) == ("agents", Level.PROBLEM)
    assert found.message.startswith("asking all agents to dial each other did not finish in time: ")
    assert asked[1:] == [(False, 0, 7.0), (True, PROBE, 14.0)]
    silent.clear()
    assert ask() == ask(others=False) == Told((REPORT,))
    assert asked[3:] == [(False, 0, 7.0), (True, PROBE, 14.0), (False, 0, 7.0)]


def test_all_takes_fifteen_seconds_at_most_unless_links_are_measured() -> None:
    assert doctor.bound_of(None, measured=False) == 15.0
    assert doctor.bound_of(None, measured=True) == 75.0
    assert doctor.bound_of(2.5, measured=True) == 2.5


def test_checks_run_at_the_same_time_and_those_that_hang_are_told() -> None:
    met = threading.Barrier(2)
    stuck = threading.Event()

    def meet() -> str:
        met.wait(60)  # for the other check: both run at the same time
        return "fact"

    def hang() -> str:
        stuck.wait(60)
        return "late"

    quick = [Check("a", meet, ""), Check("b", meet, "")]
    finish(quick, 60.0)
    hung = Check("network", hang, "getent hosts NAME")
    finish([hung], 0.0)
    try:
        assert hung.facts() is None
        for check in quick:
            assert check.findings(lambda fact: [ok("x", fact)], 15.0) == [ok("x", "fact")]
        assert hung.findings(lambda fact: [ok("x", fact)], 15.0) == [
            problem(
                "network",
                "this check did not finish within 15 s",
                "getent hosts NAME; allreduced doctor --timeout waits longer",
            )
        ]
    finally:
        stuck.set()


def test_a_check_that_raises_tells_whoever_asks() -> None:
    check: Check[int] = Check("a", lambda: 1 // 0, "")
    finish([check], 60.0)
    with pytest.raises(ZeroDivisionError):
        check.facts()


def test_an_agent_that_hangs_keeps_nothing_else_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stuck = threading.Event(), threading.Event()

    def ask() -> Told:
        asked.set()
        stuck.wait(60)
        return Told((REPORT,))

    def until_asked(checks: list[Check[object]], bound: float) -> None:
        assert asked.wait(60)
        finish([check for check in checks if check.subject != "agent"], 60.0)

    monkeypatch.setattr(examination, "finish", until_asked)
    with contextlib.closing(bind_socket(str(tmp_path / "agent.sock"))) as bound:
        try:
            found = examine(Settings(), bound.name, ask, bound=15.0)
        finally:
            stuck.set()
    assert found.ways == ()
    hung = [one for one in found.findings if "did not finish" in one.message]
    assert [(one.subject, one.level, one.message) for one in hung] == [
        ("agent", Level.PROBLEM, "this check did not finish within 15 s")
    ]
    assert {"settings", "memory", "IPv6", "security", "RDMA"} <= {one.subject for one in found.findings}


SELF = ConfigError("'a' is listed among the peers", path="peers.static", hint="list the others")
CPUS = ConfigError("no such CPU", path="engine", hint="choose others")
UNREADABLE = ConfigError("the secret file cannot be read", path="security.secret_file")


def test_settings_that_a_start_refuses_are_problems() -> None:
    assert judge_settings([], []) == [ok("settings", "they are valid, and an agent starts with them")]
    assert judge_settings([SELF, CPUS], []) == [
        problem("settings", "an agent does not start with them: 'a' is listed among the peers", "list the others"),
        problem("settings", "an agent does not start with them: no such CPU", "choose others"),
    ]


def test_what_is_told_elsewhere_is_not_told_twice() -> None:
    security = problem("security", UNREADABLE.message, "")
    below = note("settings", "they are valid; what keeps an agent from starting with them is told below")
    assert judge_settings([UNREADABLE], [security]) == [below]
    assert judge_settings([ConfigError("no RDMA", path="peers.transport")], []) == [below]
    assert [one.level for one in judge_settings([UNREADABLE, CPUS], [security])] == [Level.PROBLEM]
    assert judge_settings([AgentUnavailable("the native kernels cannot be loaded")], [])[0].level is Level.OK


@only_root
def test_what_only_this_user_may_not_do_is_no_problem_of_an_agent_of_another_user(tmp_path: Path) -> None:
    settings = Settings(agent=Agent(node="a"), access=Access(socket_group="4322"))
    with as_user(STRANGER):
        errors = list(refusals("a", settings))
    (error,) = errors
    message = "the socket cannot be given to the group with gid 4322: Operation not permitted"
    assert error.message == message
    assert judge_settings(errors, [], foreign=True) == [
        note(
            "settings",
            f"whether the agent may do all that they ask for cannot be told as this user, who may not: {message}",
            "make the agent's user a member of that group, or choose one that it is in",
        )
    ]
    assert judge_settings(errors, []) == [
        problem("settings", f"an agent does not start with them: {message}", error.hint)
    ]
    assert [one.level for one in judge_settings([CPUS, error], [], foreign=True)] == [Level.PROBLEM, Level.NOTE]


@only_root
@pytest.mark.parametrize(
    ("uid", "service", "level"),
    [
        (STRANGER, False, Level.PROBLEM),
        (STRANGER, True, Level.NOTE),
        (STRANGER + 1, False, Level.NOTE),
        (None, False, Level.NOTE),
        (0, True, Level.NOTE),
    ],
)
def test_whose_agent_runs_says_what_a_user_can_judge(
    uid: int | None, service: bool, level: Level, open_folder: Path
) -> None:
    """``uid``: as the agent tells; None where it tells this user nothing."""
    settings = Settings(agent=Agent(node="a"), access=Access(socket_group="4322"))

    def ask() -> Told:
        if uid is None:
            raise AuthenticationError("you may not ask")
        return Told((replace(REPORT, uid=uid),))

    with contextlib.closing(bind_socket(str(open_folder / "agent.sock"), mode=0o666)) as bound, as_user(STRANGER):
        found = examine(settings, bound.name, ask, bound=60.0, service=service)
    assert [one.level for one in found.findings if "gid 4322" in one.message] == [level]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[access]\nusers = ["nosuch"]\n', "access.users names 'nosuch'"),
        ('[access]\nsocket_group = "nosuch"\n', "access.socket_group names 'nosuch'"),
        ("[engine]\ncpus = [999]\n", "the reduction threads cannot be started"),
        ('[peers]\nlisten = "tcp://192.0.2.1:4981"\n[security]\ninsecure = true\n', "cannot listen at tcp://192.0.2.1"),
        ('[metrics]\nlisten = "192.0.2.1:4124"\n', "metrics cannot be served at 192.0.2.1:4124"),
    ],
)
def test_the_doctor_tells_what_the_start_refuses(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'[agent]\nnode = "a"\nsocket = "{tmp_path}/agent.sock"\n{text}')
    assert main(["doctor", "--config", str(config), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [one for one in findings if one["subject"] == "settings"]
    assert (found["level"], words in found["message"]) == ("problem", True), found
    assert [one for one in findings if "(NAT)" in one["message"]] == []


def test_a_group_is_advised_only_where_it_lets_in() -> None:
    (found,) = judge_socket(replace(SOCKET, answer=errno.EACCES))
    assert found.mend.startswith("sudo usermod -aG")
    (found,) = judge_socket(replace(SOCKET, mode=0o600, answer=errno.EACCES))
    assert found.mend == "let the user in: access.users in the agent's settings, then systemctl reload allreduced"


REACHED = Dialled("reached", "", 0.001)
PEER = PeerFacts("b", "tcp://10.0.0.2:4123", ("10.0.0.2",), local=False, dialled=REACHED)
NETWORK = NetworkFacts(
    host="a",
    host_addresses=("10.0.0.1",),
    listening="tcp://0.0.0.0:4123",
    advertised="tcp://10.0.0.1:4123",
    advertised_here=False,
    interface=Interface("eth0", 1500, bridge=False),
    ipv6=True,
    peers=(PEER,),
)


def test_a_good_network_has_nothing_to_mend() -> None:
    found = list(judge_network(NETWORK))
    assert [(one.subject, one.level) for one in found] == [
        ("host name", Level.OK),
        ("IPv6", Level.OK),
        ("address", Level.OK),
        ("peer b", Level.OK),
    ]


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (replace(NETWORK, host_addresses=()), ("host name", Level.WARNING)),
        (replace(NETWORK, advertised="tcp://127.0.0.1:4123", advertised_here=True), ("address", Level.PROBLEM)),
        (replace(NETWORK, advertised="tcp://0.0.0.0:4123"), ("address", Level.PROBLEM)),
        (replace(NETWORK, advertised="tcp://169.254.1.1:4123"), ("address", Level.PROBLEM)),
        (replace(NETWORK, interface=Interface("docker0", 1500, bridge=True)), ("address", Level.PROBLEM)),
        (replace(NETWORK, interface=Interface("wg0", 1280, bridge=False)), ("MTU", Level.WARNING)),
    ],
)
def test_each_fault_of_the_network_is_told(facts: NetworkFacts, wanted: tuple[str, Level]) -> None:
    assert bad(list(judge_network(facts))) == [wanted]


@pytest.mark.parametrize(
    ("facts", "subject", "mend"),
    [
        (replace(NETWORK, ipv6=False), "IPv6", "sysctl "),
        (replace(NETWORK, interface=None), "address", "ip -br address"),
        (replace(NETWORK, interface=Interface("", 0, bridge=False)), "address", "ip -br address"),
        (replace(NETWORK, host_addresses=("127.0.1.1",)), "host name", "in peers.listen"),
    ],
)
def test_what_may_be_right_is_a_note_with_what_else_to_do(facts: NetworkFacts, subject: str, mend: str) -> None:
    (found,) = [one for one in judge_network(facts) if one.level is Level.NOTE]
    assert (found.subject, found.mend.startswith(mend)) == (subject, True), found
    assert bad(list(judge_network(facts))) == []


def test_an_address_to_listen_at_is_not_behind_a_translation_of_addresses() -> None:
    facts = replace(NETWORK, listening="tcp://10.0.0.1:4123", interface=Interface("", 0, bridge=False))
    assert [one for one in judge_network(facts) if one.subject == "address"] == []
    (found,) = [one for one in judge_network(replace(facts, listening="tcp://10.0.0.9:1")) if one.subject == "address"]
    assert (found.level, "(NAT)" in found.message) == (Level.NOTE, True)


@pytest.mark.parametrize(
    ("descriptors", "most"), [(None, 256), (1 << 20, 256), (1024, 256), (256, 72), (64, 8), (40, 1), (0, 1)]
)
def test_as_many_are_dialled_at_once_as_descriptors_allow(descriptors: int | None, most: int) -> None:
    assert at_once(descriptors) == most


async def test_many_listed_agents_are_dialled_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now = 0
    most = 0

    async def dial(_: str) -> Dialled:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return REACHED

    monkeypatch.setattr(network, "dial_once", dial)
    monkeypatch.setattr(network, "at_once", lambda _: 7)
    peers = tuple(StaticPeer(f"n{number}", f"tcp://127.0.0.1:{number + 1}") for number in range(50))
    facts = await network_facts(Settings(peers=Peers(static=peers, listen="tcp://127.0.0.1:0")))
    assert (len(facts.peers), most) == (50, 7)


def test_the_kernel_tells_of_interfaces() -> None:
    assert interface_facts("127.0.0.1") == Interface("lo", int(Path("/sys/class/net/lo/mtu").read_text()), bridge=False)
    assert interface_facts("192.0.2.1") == Interface("", 0, bridge=False)


def test_loopback_is_well_where_all_agents_are_here() -> None:
    here = replace(PEER, address="tcp://127.0.0.1:4124", addresses=("127.0.0.1",), local=True)
    facts = replace(NETWORK, advertised="tcp://127.0.0.1:4123", advertised_here=True, peers=(here,))
    assert bad(list(judge_network(facts))) == []


@pytest.mark.parametrize(
    ("dialled", "words"),
    [
        (Dialled("refused", "Connection refused", 0.0), "no agent listens"),
        (Dialled("silent", "nothing came back within 2 s", 0.0), "a firewall"),
        (Dialled("unknown", "b: Name or service not known", 0.0), "not known here"),
        (Dialled("failed", "Permission denied", 0.0), "Permission denied"),
    ],
)
def test_refused_silent_and_unknown_are_told_apart(dialled: Dialled, words: str) -> None:
    found = judge_peer(replace(PEER, dialled=dialled))
    assert (found.subject, found.level) == ("peer b", Level.PROBLEM)
    assert words in found.message
    assert found.mend


@pytest.mark.parametrize(
    ("name", "level", "words", "mend"),
    [
        (NameFacts("agents:1", ("10.0.0.1:1", "10.0.0.2:1")), Level.OK, "agents:1 leads to 10.0.0.1:1, 10.0.0.2:1", ""),
        (
            NameFacts("agents:1", (), "no such name"),
            Level.WARNING,
            "not known here: no such name",
            "getent ahosts agents;",
        ),
        (NameFacts("_a._tcp.b", (), "no such name"), Level.WARNING, "not known here: no such", "dig SRV _a._tcp.b;"),
    ],
)
def test_the_name_behind_which_agents_are(name: NameFacts, level: Level, words: str, mend: str) -> None:
    (found,) = [one for one in judge_network(replace(NETWORK, name=name)) if one.subject == "peers.dns"]
    assert (found.level, words in found.message, found.mend.startswith(mend)) == (level, True, True), found


async def test_a_name_is_looked_up_and_own_addresses_are_not_dialled() -> None:
    known = await network_facts(Settings(peers=Peers(dns="localhost:1")))
    assert known.name is not None
    assert "127.0.0.1:1" in known.name.places
    assert known.peers == ()
    unknown = await network_facts(Settings(peers=Peers(dns="no-such-name.invalid:1")))
    assert unknown.name is not None
    assert (unknown.name.places, bool(unknown.name.problem)) == ((), True)


@pytest.mark.parametrize(
    ("peers", "told"),
    [
        (Peers(), ""),
        (Peers(static=(StaticPeer("b", "tcp://192.0.2.7:9"),)), "tcp://{}:4123"),
        (Peers(listen="tcp://0.0.0.0:77", static=(StaticPeer("b", "tcp://192.0.2.7:9"),)), "tcp://{}:77"),
        (Peers(listen="tcp://127.0.0.1:77", static=(StaticPeer("b", "tcp://192.0.2.7:9"),)), "tcp://127.0.0.1:77"),
        (Peers(advertise="tcp://192.0.2.1:5", static=(StaticPeer("b", "tcp://192.0.2.7:9"),)), "tcp://192.0.2.1:5"),
        (Peers(dns="192.0.2.7:55"), "tcp://{}:55"),
    ],
)
async def test_what_others_are_told_follows_from_the_settings(
    peers: Peers, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192.0.2.0/24 is for documentation: nobody is there, and the way to it is that to other networks."""

    async def from_here(host: str) -> str:
        assert host == "192.0.2.7"
        return "10.1.2.3"

    async def nobody(*_: object, **__: object) -> Dialled:
        return Dialled("refused", "", 0.0)

    monkeypatch.setattr(network, "source_address", from_here)
    monkeypatch.setattr(network, "dial_once", nobody)
    assert (await network_facts(Settings(peers=peers))).advertised == told.format("10.1.2.3")


def test_secrets() -> None:
    def levels(settings: Settings, *, remote: bool) -> list[Level]:
        return [one.level for one in judge_security(security_facts(settings), remote=remote)]

    assert levels(Settings(), remote=False) == [Level.OK]
    assert levels(Settings(), remote=True) == [Level.NOTE]
    assert levels(Settings(security=Security(insecure=True)), remote=True) == [Level.WARNING]
    assert levels(Settings(security=Security(secret="short")), remote=True) == [Level.WARNING]
    assert levels(Settings(security=Security(secret="x" * 32)), remote=True) == [Level.OK]
    (found,) = judge_security(security_facts(Settings(security=Security(secret_file="/no/such/file"))), remote=True)
    assert (found.level, "cannot be read" in found.message) == (Level.PROBLEM, True)


def test_certificates(tmp_path: Path) -> None:
    authority = TestAuthority.make(tmp_path)

    def found(node: str, files: CertificateFiles) -> list[tuple[str, Level]]:
        security = Security(mode="mtls", ca=files.ca, certificate=files.certificate, key=files.key)
        settings = Settings(agent=Agent(node=node), security=security)
        return [(one.subject, one.level) for one in judge_security(security_facts(settings), remote=True)]

    files = authority.issue("a")
    assert found("a", files) == [("certificate", Level.OK), ("security", Level.OK)]
    assert found("b", files) == [("certificate", Level.PROBLEM), ("security", Level.OK)]
    Path(files.key).chmod(0o644)
    assert found("a", files) == [("certificate", Level.PROBLEM), ("security", Level.OK)]
    Path(files.key).unlink()
    assert found("a", files) == [("certificate", Level.PROBLEM), ("security", Level.OK)]


def test_a_certificate_that_ends_soon_is_told() -> None:
    end = End(Role.AUTHORITY, "/etc/ca.pem", "of tests", 0.0)
    found = judge_expiry("a", 13 * 86400, end)
    assert found.level is Level.WARNING
    assert "of tests in /etc/ca.pem ends in 13.0 days" in found.message
    assert judge_expiry("a", 15 * 86400, end).level is Level.OK


def reaches(node: str, outcome: str = "reached", seconds: float = 0.0002, bandwidth: int = 0) -> ReachReport:
    return ReachReport(node, f"tcp://{node}:4123", outcome, "", seconds, bandwidth)


def report(node: str, *peers: str, reach: tuple[ReachReport, ...] = (), release: str = "0.1.0") -> AgentReport:
    linked = tuple(PeerReport(peer, 1, f"tcp://{peer}:4123", 0.1) for peer in peers)
    return replace(agent(node), peers=linked, reach=reach, release=release, advertised=f"tcp://{node}:4123")


A = report("a", "b", reach=(reaches("b"),))
B = report("b", "a", reach=(reaches("a"),))


def test_agents_that_reach_each_other_are_well() -> None:
    assert [(one.subject, one.level) for one in judge_cluster((A, B), ())] == [
        ("release", Level.OK),
        ("peers", Level.OK),
    ]
    assert ways((A, B)) == (Way("a", "b", True, reaches("b")), Way("b", "a", True, reaches("a")))


def test_a_way_that_fails_in_one_direction_is_named() -> None:
    found = list(judge_cluster((A, report("b", "a", reach=(reaches("a", "silent"),))), ()))
    assert bad(found) == [("b -> a", Level.WARNING)]
    assert "tcp://a:4123 cannot be dialled from b: silent" in found[1].message


def test_agents_without_a_link_are_named() -> None:
    found = list(judge_cluster((report("a", reach=(reaches("b", "refused"),)), report("b", "a")), ()))
    assert ("a -> b", Level.PROBLEM) in bad(found)


def test_unanswered_agents_and_mixed_releases_are_named() -> None:
    gone = UnansweredReport("c", "did not answer within 1.25 s")
    found = list(judge_cluster((A, report("b", "a", reach=(reaches("a"),), release="0.2.0")), (gone,)))
    assert bad(found) == [("release", Level.WARNING), ("agent c", Level.PROBLEM)]
    assert "0.1.0 on a; 0.2.0 on b" in found[0].message


def test_a_loopback_address_among_others_is_named() -> None:
    wrong = replace(B, advertised="tcp://127.0.0.1:4123")
    assert bad(list(judge_cluster((A, wrong), ()))) == [("agent b", Level.PROBLEM)]
    alone = [replace(one, advertised="tcp://127.0.0.1:4123") for one in (A, B)]
    assert bad(list(judge_cluster(alone, ()))) == []


def test_nothing_is_said_where_no_agent_runs() -> None:
    assert list(judge_cluster((), ())) == []
    assert list(judge_cluster((REPORT,), ())) != []


FOUND = Examination(
    (ok("memory", "enough"), note("IPv6", "none"), warning("MTU", "small", "ip link"), problem("peer b", "off", "on")),
    (Way("a", "b", True, reaches("b", bandwidth=10**9)), Way("b", "a", False, reaches("a", "refused"))),
)


def test_findings_and_the_table_are_written() -> None:
    assert lines(FOUND) == [
        "ok      memory: enough",
        "note    IPv6: none",
        "warning MTU: small",
        "        mend: ip link",
        "problem peer b: off",
        "        mend: on",
        "",
        "reaches  a                 b",
        "a        -                 0.20 ms 1.00 GB/s",
        "b        refused, no link  -",
        "",
        "1 problem, 1 warning",
    ]
    assert lines(FOUND, quiet=True)[:2] == ["warning MTU: small", "        mend: ip link"]
    assert lines(Examination((ok("memory", "enough"),), ()), quiet=True) == ["0 problems, 0 warnings"]


def test_what_other_agents_chose_cannot_command_a_terminal() -> None:
    evil = "b\x1b]0;owned\x07\n"
    found = Examination((problem(evil, evil, evil),), (Way("a", evil, True, reaches(evil)),))
    for line in lines(found):
        assert line.isprintable() or not line, line


def test_of_many_agents_only_ways_that_fail_are_listed() -> None:
    names = [f"n{number:02}" for number in range(20)]
    every = tuple(Way(a, b, True, reaches(b, "silent" if b == "n19" else "reached")) for a in names for b in names)
    found = lines(Examination((), every))
    assert found[:2] == ["20 agents; ways that fail: 20", "  n00 -> n19: silent"]
    none = lines(Examination((), tuple(Way(a, b, False, None) for a in names for b in names)))
    assert none[0] == "20 agents; ways that fail: 400"
    assert none[65] == "  … and 336 more"


def test_json_has_everything() -> None:
    told = json.loads(json.dumps(as_json(FOUND)))
    assert told["version"] == 1
    assert told["findings"][3] == {"subject": "peer b", "level": "problem", "message": "off", "mend": "on"}
    assert told["ways"][0]["bandwidth"] == 10**9
    assert [way["linked"] for way in told["ways"]] == [True, False]


def test_the_worst_level_counts() -> None:
    assert worst(FOUND.findings) is Level.PROBLEM
    assert worst(FOUND.findings[:3]) is Level.WARNING
    assert worst(()) is Level.OK
