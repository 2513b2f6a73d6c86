"""What the agents tell of each other: who reaches whom, who says nothing, which releases run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from allreduced.core.addresses import is_loopback, parse_address
from allreduced.core.errors import ConfigError
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, warning
from allreduced.protocol.status import AgentReport, ReachReport, UnansweredReport

SLOW_LINK: Final = 0.005
"""Seconds to open a connection from which on a link is far for what it is used for."""


@dataclass(frozen=True, slots=True)
class Way:
    """From one agent to another. ``linked``: they have a link now, whoever dialled. ``reach``: None: not tried."""

    source: str
    target: str
    linked: bool
    reach: ReachReport | None


def ways(reports: Sequence[AgentReport]) -> tuple[Way, ...]:
    """Return the ways between all agents that reported, and to those that they know, by source and target."""
    names = sorted({report.node for report in reports} | {peer.node for report in reports for peer in report.peers})
    found = []
    for report in sorted(reports, key=lambda report: report.node):
        linked = {peer.node for peer in report.peers}
        reach: Mapping[str, ReachReport] = {one.node: one for one in report.reach if one.node}
        known = sorted(set(names) | set(reach))
        found += [Way(report.node, name, name in linked, reach.get(name)) for name in known if name != report.node]
    return tuple(found)


def judge_cluster(reports: Sequence[AgentReport], unanswered: Sequence[UnansweredReport]) -> Iterator[Finding]:
    """Yield what is to be said about the agents together. The first report is of the agent that was asked."""
    if not reports:
        return
    yield from _releases(reports)
    for one in unanswered:
        who = f"agent {one.node}" if one.node else "agents"
        yield problem(who, one.reason, f"on {one.node or 'that node'}: systemctl status allreduced; its log says more")
    yield from _ways(reports)
    yield from _addresses(reports)


def _releases(reports: Sequence[AgentReport]) -> Iterator[Finding]:
    by_release: dict[str, list[str]] = {}
    for report in reports:
        by_release.setdefault(report.release or "a release without a name", []).append(report.node)
    if len(by_release) == 1:
        yield ok("release", f"all agents run {next(iter(by_release))}")
        return
    told = "; ".join(f"{release} on {', '.join(nodes)}" for release, nodes in sorted(by_release.items()))
    yield warning("release", f"the agents are not of one release: {told}", "upgrade one node at a time to the newest")


def _ways(reports: Sequence[AgentReport]) -> Iterator[Finding]:
    failed = False
    for way in ways(reports):
        subject = f"{way.source} -> {way.target}"
        reach = way.reach
        if not way.linked and any(way.target == report.node for report in reports):
            failed = True
            yield problem(subject, "there is no link between these agents", _mend(way.target, reach))
        if reach is None or reach.outcome == "reached":
            if reach is not None and reach.seconds > SLOW_LINK:
                yield note(subject, f"opening a connection takes {reach.seconds * 1e3:.1f} ms: the nodes are far apart")
            continue
        failed = True
        if reach.outcome == "unknown" and not reach.address:
            yield note(subject, f"{way.target} tells no address; the link was dialled from there")
        else:
            text = f"{reach.address} cannot be dialled from {way.source}: {reach.outcome} ({reach.detail})"
            consequence = "; a link that is lost can be made anew from one side only" if way.linked else ""
            yield warning(subject, text + consequence, _mend(way.target, reach))
    if len(reports) > 1 and not failed and any(report.reach for report in reports):
        yield ok("peers", "every agent reaches every other at the address that it tells")


def _mend(target: str, reach: ReachReport | None) -> str:
    match reach.outcome if reach is not None else "":
        case "refused":
            return f"on {target}: systemctl start allreduced; check peers.listen and peers.advertise"
        case "silent":
            return f"let the port in on {target} (nft list ruleset), and check the route (ip route get …)"
        case "unknown":
            return f"make the name known on all nodes, or set peers.advertise on {target} to a numeric address"
        case _:
            return f"see the logs of both agents, and peers.advertise on {target}"


def _addresses(reports: Sequence[AgentReport]) -> Iterator[Finding]:
    """Find loopback addresses that are told to others: right only where all are on one machine."""
    hosts = {}
    for report in reports:
        try:
            hosts[report.node] = parse_address(report.advertised).host if report.advertised else ""
        except ConfigError:
            continue
    if all(not host or is_loopback(host) for host in hosts.values()):
        return
    for node, host in hosts.items():
        if host and is_loopback(host):
            yield problem(
                f"agent {node}",
                f"it tells others to dial {host}, which is themselves",
                f"set peers.advertise on {node}",
            )
