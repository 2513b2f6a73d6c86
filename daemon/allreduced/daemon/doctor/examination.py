"""The whole examination: of this machine, its settings, and what the running agents say of each other."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from allreduced.core.errors import AgentUnavailable, AllReducedError, AuthenticationError, ConfigError
from allreduced.daemon.doctor.check import Check, finish
from allreduced.daemon.doctor.cluster import Way, judge_cluster, ways
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, refused
from allreduced.daemon.doctor.local_socket import judge_socket, socket_facts
from allreduced.daemon.doctor.machine import judge_machine, machine_facts
from allreduced.daemon.doctor.network import NetworkFacts, judge_network, network_facts
from allreduced.daemon.doctor.rdma import judge_rdma, rdma_facts
from allreduced.daemon.doctor.security import judge_security, security_facts
from allreduced.daemon.settings import Settings
from allreduced.daemon.start_check import node_of, refusals
from allreduced.protocol.status import AgentReport, UnansweredReport

_TOLD_ELSEWHERE: Final = frozenset({"peers.advertise", "peers.transport"})
"""Settings of which other parts say more."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the agents told, that of this node first; empty where none runs.

    ``findings``: what is to be said of how they could be asked. ``foreign``: that of this node is, or was, another
    user's than the one who asks.
    """

    reports: tuple[AgentReport, ...] = ()
    unanswered: tuple[UnansweredReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order in which they are read, and the table of who reaches whom."""

    findings: tuple[Finding, ...]
    ways: tuple[Way, ...]


def examine(
    settings: Settings, socket: str, ask: Callable[[], Told], *, bound: float, service: bool = False
) -> Examination:
    """Examine everything; nothing that runs is disturbed, and nothing is changed.

    Takes ``bound`` seconds at most: where a check has not ended by then, a finding says so.

    ``socket``: of this node's agent. ``ask``: asks it, and through it the others, in less than ``bound`` seconds.
    ``service``: the settings are those of the service, which has a user and groups of its own.
    """
    files = "look at the files that the settings name: one may be on a file system that hangs"
    names = "getent hosts NAME, for each name in the settings: the resolver may be silent"
    refused_by = Check("settings", lambda: list(refusals(node_of(settings), settings)), f"{files}; {names}")
    machine = Check("machine", lambda: machine_facts(settings), "see the kernel's log: dmesg")
    network = Check("network", lambda: _network(settings), names)
    security = Check("security", lambda: security_facts(settings), files)
    rdma = Check("RDMA", lambda: rdma_facts(settings), "see the kernel's log: dmesg; a driver may hang")
    agent = Check("agent", lambda: _agent(socket, ask), "it hangs or is stopped: see its log, and restart it")
    finish([refused_by, machine, network, security, rdma, agent], bound)
    known = network.facts()
    remote = isinstance(known, NetworkFacts) and any(not peer.local for peer in known.peers)
    of_security = security.findings(lambda facts: judge_security(facts, remote=remote), bound)
    told = agent.facts() or Told()
    found = [
        *refused_by.findings(
            lambda errors: judge_settings(errors, of_security, foreign=service or told.foreign), bound
        ),
        *machine.findings(judge_machine, bound),
        *network.findings(_judge_network, bound),
        *of_security,
        *rdma.findings(judge_rdma, bound),
        *agent.findings(lambda told: told.findings, bound),
        *judge_cluster(told.reports, told.unanswered),
    ]
    return Examination(tuple(found), ways(told.reports))


def judge_settings(
    refused_by: Sequence[AllReducedError], others: Sequence[Finding], *, foreign: bool = False
) -> list[Finding]:
    """Return what is to be said of settings that a start would refuse so. Pure.

    ``others``: findings about the same settings, which need not be told twice. ``foreign``: the agent is another
    user's than the one for whom it was found out, so what the kernel forbids here may be allowed to it.
    """
    subject, told = "settings", {one.message for one in others}
    # That the kernels are missing is no fault of the settings, and the socket may be for another user to make.
    faults = [
        error
        for error in refused_by
        if not isinstance(error, AgentUnavailable) and getattr(error, "path", "") != "agent.socket"
    ]
    if not faults:
        return [ok(subject, "they are valid, and an agent starts with them")]
    new = [error for error in faults if error.message not in told and getattr(error, "path", "") not in _TOLD_ELSEWHERE]
    if not new:
        return [note(subject, "they are valid; what keeps an agent from starting with them is told below")]
    return [
        note(
            subject,
            f"whether the agent may do all that they ask for cannot be told as this user, who may not: {error.message}",
            error.hint,
        )
        if foreign and _forbidden(error)
        else problem(subject, f"an agent does not start with them: {error.message}", error.hint)
        for error in new
    ]


def _forbidden(error: AllReducedError) -> bool:
    """Return whether it is a matter of who asks: the kernel forbade something to this user, and its groups."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EPERM, errno.EACCES)


def _network(settings: Settings) -> NetworkFacts | AllReducedError:
    try:
        return asyncio.run(network_facts(settings))
    except AllReducedError as error:
        return error


def _judge_network(facts: NetworkFacts | AllReducedError) -> Iterable[Finding]:
    return judge_network(facts) if isinstance(facts, NetworkFacts) else [refused("address", facts)]


def _agent(socket: str, ask: Callable[[], Told]) -> Told:
    """Look at the socket, and ask the agent behind it, if there is one."""
    try:
        facts = socket_facts(socket)
    except ConfigError as error:
        return Told(findings=(refused("socket", error),))
    of_socket = tuple(judge_socket(facts))
    foreign = facts.kind == "socket" and facts.uid != facts.asker
    if facts.answer != 0:
        return Told(findings=of_socket, foreign=foreign)
    try:
        told = ask()
    except AllReducedError as error:
        of_agent = problem("agent", error.message, error.hint or "see the agent's log")
        foreign = foreign or isinstance(error, AuthenticationError)  # its own user may always ask
        return Told(findings=(*of_socket, of_agent), foreign=foreign)
    foreign = any(report.uid != os.geteuid() for report in told.reports[:1])
    return replace(told, findings=(*of_socket, *told.findings), foreign=foreign)
