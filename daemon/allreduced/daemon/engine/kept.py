"""Results that are kept after their delivery, until every other member has confirmed that it has them too.

Who has delivered an operation must be able to give its result to a member that lacks it, should the generation end
before all have it. Each READY carries a serial of its sender; who delivers an operation confirms these serials to their
senders, with its next READY, or in a frame of its own when there is none for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.limits import MAX_NAME
from allreduced.daemon.engine.actions import SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import Operation, State
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.protocol.change import MAX_RESULT_NAMES, MAX_RESULTS
from allreduced.protocol.peer import Confirm


def must_keep(unconfirmed: int) -> bool:
    """Tell whether a delivered result must stay: ``unconfirmed`` has the bits of members that may still need it."""
    return unconfirmed != 0


class Keeper:
    """Serials and confirmations of one group with other members."""

    __slots__ = (
        "_agreed",
        "_by_serial",
        "_context",
        "_lacking",
        "_names",
        "_owed",
        "_owing",
        "_serial",
        "_since",
        "_timers",
        "group",
        "wake",
    )

    def __init__(self, context: Context, timers: Timers[Timed], group: Group) -> None:
        self._context = context
        self._timers = timers
        self.group = group
        self._serial = 0
        self._by_serial: dict[int, Operation] = {}
        """What this member was ready for, until all have it or it failed."""
        self._agreed: dict[tuple[str, int], Operation] = {}
        """Results of the last change, until all members have said that they have all of them."""
        self._lacking: set[tuple[str, int]] = set()
        """Those that are not delivered here yet."""
        self._names = 0
        """Bytes of the names of these."""
        self._owed: list[list[int]] = [[] for _ in group.members]
        """By member: serials of its READYs that are to be confirmed."""
        self._owing = 0
        self._since = 0.0
        """When the oldest of them was delivered, or later where that one was confirmed."""
        self.wake = -1.0

    @property
    def has_room(self) -> bool:
        """Whether one more operation may become ready, so that a list of all results always fits a frame."""
        return len(self._by_serial) + len(self._agreed) < MAX_RESULTS and self._names < MAX_RESULT_NAMES - MAX_NAME

    def enlist(self, operation: Operation) -> None:
        """Give an operation its serial, before its first READY."""
        self._serial = operation.serial = self._serial + 1
        operation.unconfirmed = self.group.present
        self._by_serial[self._serial] = operation
        self._names += _length(operation.name)

    def forget(self, operation: Operation) -> None:
        """Take an operation out that all members have, or that failed."""
        if operation.serial in self._by_serial:
            self._context.freed |= not self.has_room
            del self._by_serial[operation.serial]
            self._names -= _length(operation.name)
        elif self._agreed and self._agreed.get(operation.key) is operation:
            self._context.freed |= not self.has_room
            del self._agreed[operation.key]
            self._names -= _length(operation.name)

    def delivered(self, operation: Operation) -> None:
        """Owe the others the news that this member has the result."""
        owed, context = self._owed, self._context
        if self._lacking and operation.key in self._lacking:
            self._lacking.discard(operation.key)
            if not self._lacking:
                self._confirm_everything()
            return
        if not self._owing:
            self._since = context.now
        for _, member in self.group.others:
            ready = operation.peers[member].ready
            if ready is not None and ready.serial:
                owed[member].append(ready.serial)
                self._owing += 1
        if self.wake < 0.0:
            self._timers.set(self, context.now + context.limits.confirm_seconds)

    def take_owed(self, member: int) -> tuple[int, ...]:
        """Return what a READY for ``member`` can confirm."""
        owed = self._owed[member]
        if not owed:
            return ()
        taken = tuple(owed)
        owed.clear()
        self._owing -= len(taken)
        return taken

    def confirmed(self, member: int, serials: Sequence[int]) -> list[Operation]:
        """Take note that ``member`` has the results of these; return those that need not be kept any more."""
        done = []
        others = ~(1 << member)
        for serial in serials:
            operation = self._by_serial.get(serial)
            if operation is not None:
                operation.unconfirmed &= others
                if not operation.unconfirmed:
                    done.append(operation)
        return done

    def departed(self, member: int) -> list[Operation]:
        """Take note that ``member`` will never need a result; return those that need not be kept any more."""
        return self.confirmed(member, tuple(self._by_serial)) + self.has_everything(member)

    def has_everything(self, member: int) -> list[Operation]:
        """Take note that ``member`` has all results of the last change; return those that need not be kept any more."""
        done = []
        for operation in self._agreed.values():
            operation.unconfirmed &= ~(1 << member)
            if not operation.unconfirmed:
                done.append(operation)
        return done

    def begin(self) -> None:
        """Begin a generation: what was told in the last one does not count any more."""
        self._by_serial.clear()
        self._names = 0
        self._owed = [[] for _ in self.group.members]
        self._owing = 0
        self._agreed.clear()
        self._lacking.clear()
        self._context.freed = True

    def agree(self, operation: Operation) -> None:
        """Keep a result of the change until all others have said that they have all of these."""
        operation.serial = 0
        operation.unconfirmed = self.group.present
        self._agreed[operation.key] = operation
        self._names += _length(operation.name)
        if operation.state is not State.DELIVERED:
            self._lacking.add(operation.key)

    def begun(self) -> None:
        """Tell the others that this member has all results of the change, if it is so from the start.

        The others may keep some that all have confirmed to this member.
        """
        if not self._lacking:
            self._confirm_everything()

    def _confirm_everything(self) -> None:
        group = self.group
        frame = Confirm(group.number, group.generation, (), everything=True)
        for node, _ in group.others:
            self._context.out.append(SendFrame(node, frame))

    def due(self) -> None:
        """Send the confirmations that no READY carried for long enough."""
        if self._owing:
            at = self._since + self._context.limits.confirm_seconds
            if self._context.now < at:
                self._timers.set(self, at)
            else:
                self.flush()

    def flush(self) -> None:
        """Send all confirmations that are owed."""
        for node, member in self.group.others:
            self.flush_to(node, member)

    def flush_to(self, node: str, member: int) -> None:
        """Send the confirmations that are owed to ``member``: it may wait for the memory."""
        serials = self.take_owed(member)
        if serials:
            group = self.group
            self._context.out.append(SendFrame(node, Confirm(group.number, group.generation, serials, False)))


def _length(name: str) -> int:
    return len(name) if name.isascii() else len(name.encode())
