"""Results that go from a member that has delivered them to one that lacks them, after a change of generation."""

from __future__ import annotations

from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import PostReceive, Send, SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.events import Received
from allreduced.daemon.engine.flights import Fetched, Served
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import Operation, State
from allreduced.daemon.engine.verdict import LastWords
from allreduced.protocol.peer import Fetch, Grant


class Fetching:
    """Asks for results, and gives those that are kept here."""

    def __init__(self, context: Context, ending: Ending, words: LastWords) -> None:
        self._context = context
        self._ending = ending
        self._words = words

    def fetch(self, operation: Operation) -> None:
        """Ask one of the holders for the result. Nothing uses its memory any more."""
        context, group = self._context, operation.group
        region, holders = operation.region, operation.holders
        if region is None or not operation.mapped or not holders:
            self._words.give_up(operation)
            return
        node = holders[group.mine % len(holders)]
        number = context.number()
        context.receives[number] = operation.fetched = Fetched(number, operation, node, region.nbytes)
        context.out.append(PostReceive(number, node, region))
        grant = Grant(number, 0, 0, 0, 1, b"")
        frame = Fetch(group.number, group.generation, operation.name, operation.use, (grant,))
        context.out.append(SendFrame(node, frame))
        context.counters["fetched"] += 1

    def received(self, fetched: Fetched, event: Received) -> None:
        """Take a part of a result that was asked for."""
        operation = fetched.operation
        end = event.offset + event.nbytes
        fits = event.nbytes >= 1 and event.offset >= 0 and end <= fetched.nbytes and event.nbytes <= fetched.left
        if not fits or event.tag != operation.group.generation << 32:
            error = wording.bad_frame(operation, fetched.node, "sent a result that nobody asked for")
            self._words.fail(operation, error, broken=True)
            return
        fetched.left -= event.nbytes
        if fetched.left == 0:
            del self._context.receives[fetched.number]
            operation.fetched = None
            operation.state = State.RUNNING
            self._ending.deliver(operation)

    def fetch_came(self, group: Group, node: str, frame: Fetch) -> None:
        """Give a member the result that it lacks."""
        operation = group.ending.get((frame.name, frame.use))
        region = operation.region if operation is not None and operation.state is State.DELIVERED else None
        if operation is None or region is None or len(frame.grants) != 1:
            self._context.counters["frames_ignored"] += 1
            return
        if any(sending.node == node for sending in operation.sendings.values()):
            self._context.counters["frames_ignored"] += 1
            return
        context = self._context
        number = context.number()
        context.sends[number] = operation.sendings[number] = Served(operation, node)
        operation.outstanding += 1
        token, tag = frame.grants[0].token, group.generation << 32
        context.out.append(Send(number, node, token, 0, region, tag, operation.priority, group.key.uid))
