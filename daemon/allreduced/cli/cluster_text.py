"""How ``allreduced status`` writes a view of the cluster: lines of plain text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from allreduced.cli.cluster_view import (
    CallView,
    ClusterView,
    GatheringView,
    GroupView,
    LinkView,
    OperationView,
    RankView,
    WaitView,
)

MANY = 16
"""Ranks or links that are listed one by one; of more, only those that say something."""

ELSEWHERE = "the other end"
"""So begins what an agent says of a link where the reason is with the other one."""

_WAITS = {
    "memory": "memory of its own",
    "peer_memory": "memory{of}",
    "kernels": "its reductions and sends",
    "data": "data{of}",
    "withdrawal": "memory to be given back{by}",
    "verdict": "the word{of} on whether it failed",
    "change": "a change of the group to be agreed{with}",
    "rest": "what was under way before the last change of the group to stop",
    "result": "the result, which it fetches{from}",
    "quorum": "a sign of life{of}, for it may be cut off",
}


def lines(view: ClusterView) -> list[str]:
    """Return the whole view as lines."""
    out = _agents(view) + _links(view)
    for group in view.groups:
        out += ["", *_group(group)]
    for gathering in view.gatherings:
        out += ["", *_gathering(gathering)]
    if not view.groups and not view.gatherings:
        out += ["", "no groups"]
    for hidden in view.hidden:
        out += ["", f"{_number(hidden.groups, 'group')} of uid {hidden.uid}: only that user and root see more"]
    return out


def duration(seconds: float) -> str:
    """Return a time as people say it, in at most two units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02} h"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 7``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {listed}"


def columns(heading: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return a heading and rows as left-aligned columns."""
    widths = [max(map(len, cells)) for cells in zip(heading, *rows, strict=True)]
    return [
        (indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in (heading, *rows)
    ]


def printable(text: str) -> str:
    """Return a text of somebody else's without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


# Agents


def _agents(view: ClusterView) -> list[str]:
    rows = [
        (
            printable(agent.node),
            str(agent.pid),
            str(agent.uid),
            duration(agent.uptime),
            str(agent.clients),
            f"{agent.groups} (and {agent.left_out} that did not fit)" if agent.left_out else str(agent.groups),
            "this one was asked" if agent.node == view.asked else "",
        )
        for agent in view.agents
    ]
    return [
        "agents",
        *columns(("NODE", "PID", "UID", "UP", "CLIENTS", "GROUPS", ""), rows),
        *(f"  {printable(one.node) or '?'}: no answer: {printable(one.reason)}" for one in view.unanswered),
    ]


# Links


def _links(view: ClusterView) -> list[str]:
    """Return a line for each pair of agents; of many, how many have which transport, and those that are unlike most."""
    pairs: dict[frozenset[str], LinkView] = {}
    for link in sorted(view.links, key=lambda link: (_hearsay(link.way), link.node, link.peer)):
        if link.transport:
            pairs.setdefault(frozenset((link.node, link.peer)), link)
    if not pairs:
        return []
    by_transport = Counter(link.transport for link in pairs.values())
    most = by_transport.most_common(1)[0][0]
    listed = sorted(pairs.values(), key=lambda link: (link.node, link.peer))
    shown = [link for link in listed if len(pairs) <= MANY or link.transport != most]
    rows = [
        (printable(link.node), printable(link.peer), printable(link.transport), printable(link.way)) for link in shown
    ]
    out = ["", "links"]
    if len(pairs) > MANY:
        counts = ", ".join(f"{count} by {printable(name)}" for name, count in sorted(by_transport.items()))
        out.append(f"  {len(pairs)} pairs of agents, their data carried: {counts}")
    if rows:
        out += columns(("NODE", "PEER", "DATA BY", ""), rows[:MANY])
    if len(rows) > MANY:
        out.append(f"  … and {len(rows) - MANY} more that are not by {printable(most)}")
    return out


def _hearsay(way: str) -> int:
    """Return how little an end knows of the reasons: 0 where they are its own, 1 where it was told, 2 for nothing."""
    if not way:
        return 2
    return 1 if way.startswith(ELSEWHERE) else 0


# Groups


def _group(group: GroupView) -> list[str]:
    ranks, nodes = _number(group.size, "rank"), _number(len(group.members), "node")
    out = [f"{_title(group)}: generation {group.generation}, {ranks} on {nodes}, {group.state}"]
    if group.error:
        out.append(f"  {group.error}: {printable(group.reason)}")
    for member in group.members:
        if member.state == "unknown":
            out.append(f"  {ranks_text(member.ranks)} on {printable(member.node)}: its agent did not answer")
        elif group.state == "broken" and member.state == "running":
            out.append(f"  {printable(member.node)} does not know so yet")
    shown = group.ranks if len(group.ranks) <= MANY else [rank for rank in group.ranks if rank.state != "running"]
    if shown:
        rows = [
            (str(rank.rank), printable(rank.node), str(rank.pid or "-"), str(rank.uid), rank.state)
            for rank in shown[:MANY]
        ]
        out += columns(("RANK", "NODE", "PID", "UID", "PROCESS"), rows)
    if len(shown) > MANY:
        out.append(f"  … and {len(shown) - MANY} more that do not run")
    elif len(shown) < len(group.ranks):
        out.append(f"  {_number(len(group.ranks) - len(shown), 'rank')} whose processes run")
    by_rank = {rank.rank: rank for rank in group.ranks}
    for operation in group.operations:
        out += _operation(operation, by_rank)
    for failed in group.failed:
        waiting = f"{ranks_text(failed.waiting)} {_has(failed.waiting)} not called it yet"
        out += [
            f"  {_label(failed.name, failed.use)} failed; {waiting}",
            f"    {failed.error}: {printable(failed.reason)}",
        ]
    if group.more:
        out.append(f"  … and {_number(group.more, 'operation')} more, which began later")
    if not group.operations and not group.failed:
        out.append("  no operation is in flight")
    return out


def _operation(operation: OperationView, by_rank: dict[int, RankView]) -> list[str]:
    first = operation.calls[0] if operation.calls else None
    what = f": {_call(first)}" if first is not None and len(operation.calls) == 1 else ""
    since = f", began {duration(operation.age)} ago" if operation.arrivals else ""
    left = f", {duration(operation.deadline)} to its deadline" if operation.deadline is not None else ""
    out = [f"  {_label(operation.name, operation.use)}{what}{since}{left}"]
    if len(operation.calls) > 1:
        out.append("    the ranks call it differently, so it will fail:")
        out += [f"      {ranks_text(call.ranks)}: {_call(call)}" for call in operation.calls]
    for rank in operation.missing[:MANY]:
        out.append(f"    waits for {_holder(rank, by_rank)}, which has not called it")
    if len(operation.missing) > MANY:
        out.append(f"    … and for {len(operation.missing) - MANY} more: {ranks_text(operation.missing[MANY:])}")
    if operation.unknown:
        nodes = sorted({by_rank[rank].node for rank in operation.unknown if rank in by_rank})
        out.append(
            f"    waits for {ranks_text(operation.unknown)}: not known, {_agents_of(nodes)} did not answer about it"
        )
    known = not operation.missing and not operation.unknown and len(operation.calls) <= 1
    out += [
        f"    {text}" for wait in operation.waits if (known or wait.waits_for == "change") and (text := _wait(wait))
    ]
    out += _arrivals(operation)
    return out


def _arrivals(operation: OperationView) -> list[str]:
    if not operation.arrivals:
        return []
    begin = operation.arrivals[0].ago
    texts = [
        f"rank {one.rank} {duration(one.ago)} ago" if place == 0 else f"rank {one.rank} {_lag(begin - one.ago)} later"
        for place, one in enumerate(operation.arrivals)
    ]
    if len(texts) > MANY:
        texts = [texts[0], f"… {len(texts) - MANY} others", *texts[1 - MANY :]]
    return [f"    called by {', '.join(texts)}"]


def _lag(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds * 1e3:.0f} ms"


def _wait(wait: WaitView) -> str:
    if wait.waits_for == "names":
        return f"{printable(wait.node)} waits for {_agents_of(wait.nodes)} to agree which names are not used any more"
    what = _WAITS.get(wait.waits_for)
    if what is None:
        return ""
    nodes = ", ".join(map(printable, wait.nodes))
    told = {word: f" {word} {nodes}" if nodes else "" for word in ("of", "by", "with", "from")}
    return f"{printable(wait.node)} waits for {what.format(**told)}"


def _holder(rank: int, by_rank: dict[int, RankView]) -> str:
    holder = by_rank.get(rank)
    if holder is None:
        return f"rank {rank}"
    if holder.state in ("left", "gone"):
        return f"rank {rank} ({holder.state}, on {printable(holder.node)})"
    return f"rank {rank} (pid {holder.pid} on {printable(holder.node)}, {holder.state})"


def _call(call: CallView) -> str:
    op = "" if call.op == "copy" else f" {call.op}"
    root = f" from rank {call.root}" if call.root >= 0 else ""
    if not call.count and call.kind == "barrier":
        return printable(call.kind)
    algorithm = f", {printable(call.algorithm)}" if call.algorithm else ""
    return f"{printable(call.kind)}{op} {call.dtype} {printable(call.shape)}{root}, {call.nbytes} B{algorithm}"


def _label(name: str, use: int) -> str:
    return f"operation '{printable(name)}' (use {use})" if name else f"unnamed operation {use}"


# Groups that gather


def _gathering(gathering: GatheringView) -> list[str]:
    there = gathering.size - len(gathering.missing)
    out = [f"{_title(gathering)}: gathers, {there} of {_number(gathering.size, 'rank')} {_is(there)} there"]
    rows = [
        (str(claim.rank), printable(claim.node), str(claim.pid), str(claim.uid), duration(claim.waits))
        for claim in gathering.claims[:MANY]
    ]
    out += columns(("RANK", "NODE", "PID", "UID", "WAITS"), rows)
    if len(gathering.claims) > MANY:
        out.append(f"  … and {len(gathering.claims) - MANY} more")
    if gathering.missing:
        out.append(f"  waits for {ranks_text(gathering.missing)}, which {_has(gathering.missing)} not connected")
    elif gathering.silent:
        out.append(f"  every rank is there; waits for {_agents_of(gathering.silent)} to agree")
    return out


# Words


def _title(group: GroupView | GatheringView) -> str:
    return f"group '{printable(group.name)}' of job '{printable(group.job)}', uid {group.uid}"


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _agents_of(nodes: Sequence[str]) -> str:
    listed = ", ".join(map(printable, nodes))
    return f"the agent of {listed}" if len(nodes) == 1 else f"the agents of {listed}"
