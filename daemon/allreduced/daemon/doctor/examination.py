"""The whole examination: of this machine, its settings, and what the running agents say of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError
from allreduced.daemon.doctor.cluster import Way, judge_cluster, ways
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, refused
from allreduced.daemon.doctor.local_socket import judge_socket, socket_facts
from allreduced.daemon.doctor.machine import judge_machine, machine_facts
from allreduced.daemon.doctor.network import NetworkFacts, judge_network, network_facts
from allreduced.daemon.doctor.rdma import judge_rdma, rdma_facts
from allreduced.daemon.doctor.security import examine_security
from allreduced.daemon.settings import Settings
from allreduced.daemon.start_check import node_of, refusals
from allreduced.protocol.status import AgentReport, UnansweredReport

_TOLD_ELSEWHERE: Final = frozenset({"peers.advertise", "peers.transport"})
"""Settings of which other parts say more."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the agents told, that of this node first; empty where none runs."""

    reports: tuple[AgentReport, ...] = ()
    unanswered: tuple[UnansweredReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order in which they are read, and the table of who reaches whom."""

    findings: tuple[Finding, ...]
    ways: tuple[Way, ...]


def examine(settings: Settings, socket: str, ask: Callable[[], Told]) -> Examination:
    """Examine everything; nothing that runs is disturbed, and nothing is changed.

    Takes some seconds, and longer where a resolver of names says nothing, or ``ask`` waits for many agents.

    ``socket``: of this node's agent. ``ask``: asks it, and through it the others; errors it raises become findings.
    """
    network, of_network = _network(settings)
    remote = network is not None and any(not peer.local for peer in network.peers)
    of_security = list(examine_security(settings, remote=remote))
    found: list[Finding] = judge_settings(list(refusals(node_of(settings), settings)), of_security)
    found += judge_machine(machine_facts(settings))
    found += of_network
    found += of_security
    found += judge_rdma(rdma_facts(settings))
    told = Told()
    try:
        facts = socket_facts(socket)
    except ConfigError as error:
        found.append(refused("socket", error))
    else:
        found += judge_socket(facts)
        if facts.answer == 0:
            try:
                told = ask()
            except AllReducedError as error:
                found.append(problem("agent", error.message, error.hint or "see the agent's log"))
    found += judge_cluster(told.reports, told.unanswered)
    return Examination(tuple(found), ways(told.reports))


def judge_settings(refused_by: Sequence[AllReducedError], others: Sequence[Finding]) -> list[Finding]:
    """Return what is to be said of settings that a start would refuse so. Pure.

    ``others``: findings about the same settings, which need not be told twice.
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
    return [problem(subject, f"an agent does not start with them: {error.message}", error.hint) for error in new]


def _network(settings: Settings) -> tuple[NetworkFacts | None, list[Finding]]:
    try:
        facts = asyncio.run(network_facts(settings))
    except AllReducedError as error:
        return None, [refused("address", error)]
    return facts, list(judge_network(facts))
