"""The whole examination: of this machine, its settings, and what the running agents say of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError, ConfigError
from allreduced.daemon.doctor.cluster import Way, judge_cluster, ways
from allreduced.daemon.doctor.finding import Finding, ok, problem, refused
from allreduced.daemon.doctor.local_socket import judge_socket, socket_facts
from allreduced.daemon.doctor.machine import judge_machine, machine_facts
from allreduced.daemon.doctor.network import NetworkFacts, judge_network, network_facts
from allreduced.daemon.doctor.rdma import judge_rdma, rdma_facts
from allreduced.daemon.doctor.security import examine_security
from allreduced.daemon.settings import Settings
from allreduced.protocol.status import AgentReport, UnansweredReport


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
    """Examine everything. Takes some seconds; nothing that runs is disturbed, and nothing is changed.

    ``socket``: of this node's agent. ``ask``: asks it, and through it the others; errors it raises become findings.
    """
    found: list[Finding] = [ok("settings", "they are valid, and do not contradict each other")]
    found += judge_machine(machine_facts(settings))
    network, of_network = _network(settings)
    found += of_network
    found += examine_security(settings, remote=network is not None and any(not peer.local for peer in network.peers))
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


def _network(settings: Settings) -> tuple[NetworkFacts | None, list[Finding]]:
    try:
        facts = asyncio.run(network_facts(settings))
    except AllReducedError as error:
        return None, [refused("address", error)]
    return facts, list(judge_network(facts))
