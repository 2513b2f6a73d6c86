"""Turns actions of the engine and the memberships into sockets, memory and kernel jobs, and these back into events.

The only place where the pure parts meet the machine. Everything runs on the loop's thread, and nothing recurses: what
happens while actions are done waits in a queue, so that the pure parts see one event at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.chronicle import Chronicle
from allreduced.daemon.defects import Action, Event, defect, touched_by_action, touched_by_event
from allreduced.daemon.engine import actions as engine_actions
from allreduced.daemon.engine import events as engine_events
from allreduced.daemon.kernel_port import Kernels
from allreduced.daemon.lazy_timer import LazyTimer
from allreduced.daemon.membership import actions as membership_actions
from allreduced.daemon.membership import events as membership_events
from allreduced.daemon.ports import ClientPort, EnginePort, MembershipPort, Meter, PeerPort, Result
from allreduced.protocol.peer import EngineFrame, Fetch, Grant, MoreGrants, Ready
from allreduced.transports.base import Link

logger = logging.getLogger("allreduced.driver")

AT_ONCE = 128 << 10
"""Bytes (all sources and the target) up to which a reduction runs on the loop: waking a worker would take longer."""


@dataclass(slots=True, eq=False)
class _Posted:
    link: Link
    token: bytes
    buffer: int
    remaining: int


@dataclass(slots=True, eq=False)
class _Outgoing:
    link: Link
    buffer: int


class Driver:
    """Drives one agent's engine and memberships.

    Build it, :meth:`attach` the two planes, :meth:`start`, and give it events. A defect of the pure parts (an
    exception out of ``handle``, or an action that cannot be done) is logged with its traceback and ends the groups
    that it may have touched with ``InternalError``, here and by the memberships' word at the other nodes; everything
    else is served on.
    """

    def __init__(
        self,
        engine: EnginePort,
        membership: MembershipPort,
        kernels: Kernels,
        arenas: ArenaTable,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock
        self.meter: Meter | None = None
        """Is told how each call ends; None where nobody counts."""
        self._engine = engine
        self._membership = membership
        self._kernels = kernels
        self._arenas = arenas
        self._clients: ClientPort
        self._peers: PeerPort
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[tuple[Callable[..., Iterable[Action]], Event]] = deque()
        self._busy = False
        self._engine_timer = LazyTimer(clock, lambda: self.engine_event(engine_events.TimePassed()))
        self._membership_timer = LazyTimer(clock, lambda: self.membership_event(membership_events.TimePassed()))
        self._groups: dict[int, engine_events.GroupStarted] = {}
        self._submitted: dict[tuple[int, int], engine_events.Submitted] = {}
        self._chronicle = Chronicle()
        self._jobs: dict[int, int] = {}  # job to the buffer that it writes
        self._posted: dict[int, _Posted] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._draining = False
        self._idle: asyncio.Event | None = None
        self._do: dict[type, Callable[..., None]] = {
            engine_actions.CreateArena: self._create_arena,
            engine_actions.DestroyArena: self._destroy_arena,
            engine_actions.Reduce: self._reduce,
            engine_actions.PostReceive: self._post_receive,
            engine_actions.CancelReceive: self._cancel_receive,
            engine_actions.Send: self._send,
            engine_actions.CancelSend: self._cancel_send,
            engine_actions.SendFrame: self._send_operation_frame,
            engine_actions.Deliver: self._deliver,
            engine_actions.Fail: self._fail,
            engine_actions.Frozen: lambda action: self.membership_event(membership_events.Frozen(action)),
            engine_actions.GiveUp: self._give_up,
            engine_actions.SetTimer: lambda action: self._engine_timer.set(action.at),
            membership_actions.SendFrame: lambda action: self._peers.send_frame(action.node, action.frame),
            membership_actions.Admit: self._admit,
            membership_actions.Reject: self._reject,
            membership_actions.TellEngine: self._tell_engine,
            membership_actions.TellClients: self._tell_clients,
            membership_actions.SetTimer: lambda action: self._membership_timer.set(action.at),
        }

    def attach(self, clients: ClientPort, peers: PeerPort) -> None:
        """Connect the two planes. Before :meth:`start`."""
        self._clients = clients
        self._peers = peers

    def start(self) -> None:
        """Listen for completions of the kernels, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._kernels.fileno(), self._kernels_completed)
        self._arenas.on_room = lambda: self.engine_event(engine_events.RoomMade())

    @property
    def in_flight(self) -> int:
        """Operations that clients submitted and that did not end yet."""
        return len(self._submitted)

    async def drain(self, timeout: float) -> bool:
        """Refuse further submits and wait until nothing is in flight, ``timeout`` seconds at most.

        Returns whether everything ended: every operation with its result or error, every send and kernel job, and what
        other nodes still wait for.
        """
        self._draining = True
        self._idle = asyncio.Event()
        self._look_idle()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "event=drain_gave_up seconds=%.1f operations=%d sends=%d jobs=%d",
                timeout,
                len(self._submitted),
                len(self._outgoing),
                len(self._jobs),
            )
            # Whatever comes in from now on must not be delivered any more: the goodbye counts as a departure.
            self._break_groups(tuple(self._groups), _stopping())
            return False
        return True

    def close(self) -> None:
        """Stop listening and forget the timers. Call it after the planes are closed and before kernels and arenas."""
        self._engine_timer.close()
        self._membership_timer.close()
        if self._loop is not None:
            self._loop.remove_reader(self._kernels.fileno())
            self._arenas.on_room = None
            self._loop = None

    # Events

    def engine_event(self, event: engine_events.Event) -> None:
        """Give the engine an event; its actions are done on return, unless this was called from within an action."""
        if type(event) is engine_events.Submitted:
            if self._draining:
                self._call_failed(event, _stopping())
                return
            self._submitted[event.client, event.request] = event
        self._queue.append((self._engine.handle, event))
        if not self._busy:
            self._run()

    def membership_event(self, event: membership_events.Event) -> None:
        """Give the memberships an event; its actions are done on return, unless called from within an action."""
        if type(event) is membership_events.ClientJoining and self._draining:
            self._clients.failed(event.client, event.request, _stopping())
            return
        self._queue.append((self._membership.handle, event))
        if not self._busy:
            self._run()

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        """Take the link's callback: bytes landed in a posted receive."""
        posted = self._posted.get(receive)
        if posted is None or posted.link is not link:
            logger.error("event=bytes_not_posted receive=%d peer=%s", receive, link.peer.node)
            return
        posted.remaining -= nbytes
        if posted.remaining <= 0:
            del self._posted[receive]
        self.engine_event(engine_events.Received(receive, offset, nbytes, tag))

    def receive_cancelled(self, link: Link, receive: int) -> None:
        """Take the link's callback: nothing can land in the receive's memory any more."""
        posted = self._posted.get(receive)
        if posted is not None and posted.link is link:
            del self._posted[receive]
            self.engine_event(engine_events.ReceiveCancelled(receive))

    def sent(self, link: Link, send: int) -> None:
        """Take the link's callback: nothing reads the send's memory any more."""
        outgoing = self._outgoing.get(send)
        if outgoing is not None and outgoing.link is link:
            del self._outgoing[send]
            self.engine_event(engine_events.Sent(send))

    def closed(self, link: Link) -> None:
        """Take the link's last callback; whatever is still outstanding on it ends now.

        The peer plane must not return this link from ``link()`` any more.
        """
        receives = [receive for receive, posted in self._posted.items() if posted.link is link]
        for receive in receives:
            self.receive_cancelled(link, receive)
        sends = [send for send, outgoing in self._outgoing.items() if outgoing.link is link]
        for send in sends:
            self.sent(link, send)

    def _kernels_completed(self) -> None:
        for job in self._kernels.completed():
            self._jobs.pop(job, None)
            self.engine_event(engine_events.Reduced(job))

    # The loop

    def _run(self) -> None:
        """Handle queued events until there are none."""
        self._busy = True
        queue = self._queue
        try:
            while queue:
                self._handle(*queue.popleft())
        finally:
            self._busy = False
        if self._idle is not None:
            self._look_idle()

    def _handle(self, handle: Callable[..., Iterable[Action]], event: Event) -> None:
        """Handle one event and do what follows."""
        do = self._do
        try:
            actions = handle(event, self.now())
        except Exception:
            logger.exception("event=defect handling=%s", event)
            self._event_failed(event)
            return
        for action in actions:
            try:
                do[type(action)](action)
            except Exception:
                logger.exception("event=defect doing=%s", action)
                self._action_failed(action)

    def _look_idle(self) -> None:
        if self._idle is None or self._submitted or self._outgoing or self._jobs:
            return
        if self._engine.idle:
            self._idle.set()

    # Actions of the engine

    def _create_arena(self, action: engine_actions.CreateArena) -> None:
        self._arenas.create(action.buffer, action.group, action.nbytes, self._arena_created)

    def _arena_created(self, buffer: int, error: AllReducedError | None) -> None:
        if error is None:
            self.engine_event(engine_events.ArenaReady(buffer))
        else:
            self.engine_event(engine_events.ArenaFailed(buffer, error))

    def _destroy_arena(self, action: engine_actions.DestroyArena) -> None:
        if self._arenas.group_of(action.buffer):
            self._clients.arena_gone(action.buffer)
        self._arenas.drop(action.buffer)

    def _reduce(self, action: engine_actions.Reduce) -> None:
        address = self._arenas.address
        sources = [address(source) for source in action.sources]
        target = address(action.target)
        if action.target.nbytes * (len(sources) + 1) <= AT_ONCE:
            self._kernels.reduce(
                action.dtype,
                action.reduction,
                action.divisor,
                action.count,
                sources,
                target,
                partials=action.partials,
                partial_target=action.partial_target,
            )
            self.engine_event(engine_events.Reduced(action.job))
            return
        self._jobs[action.job] = action.target.buffer
        self._kernels.submit(
            action.job,
            action.dtype,
            action.reduction,
            action.divisor,
            action.count,
            sources,
            target,
            action.priority,
            partials=action.partials,
            partial_target=action.partial_target,
            share=action.share,
        )

    def _post_receive(self, action: engine_actions.PostReceive) -> None:
        link = self._peers.link(action.node)
        if link is None:  # nothing can land; a change of the group's generation, or its end, is on the way
            return
        token = link.post_receive(action.receive, self._arenas.view(action.region))
        self._posted[action.receive] = _Posted(link, token, action.region.buffer, action.region.nbytes)

    def _cancel_receive(self, action: engine_actions.CancelReceive) -> None:
        posted = self._posted.get(action.receive)
        if posted is None:  # complete, or its link is gone: nothing can land
            self.engine_event(engine_events.ReceiveCancelled(action.receive))
        else:
            posted.link.cancel_receive(action.receive)

    def _send(self, action: engine_actions.Send) -> None:
        link = self._peers.link(action.node)
        if link is None:
            self.engine_event(engine_events.Sent(action.send))
            return
        view = self._arenas.view(action.region)
        self._outgoing[action.send] = _Outgoing(link, action.region.buffer)
        link.send(
            action.send,
            action.token,
            action.offset,
            view,
            tag=action.tag,
            priority=action.priority,
            share=action.share,
        )

    def _cancel_send(self, action: engine_actions.CancelSend) -> None:
        outgoing = self._outgoing.get(action.send)
        if outgoing is not None:
            outgoing.link.cancel_send(action.send)

    def _send_operation_frame(self, action: engine_actions.SendFrame) -> None:
        frame: EngineFrame = action.frame
        if isinstance(frame, Ready | MoreGrants | Fetch) and frame.grants:
            link = self._peers.link(action.node)
            frame = replace(frame, grants=tuple(self._granted(frame.grants, link)))
            if isinstance(frame, Fetch) and not frame.grants:
                return
        self._peers.send_frame(action.node, frame)

    def _granted(self, grants: Iterable[Grant], link: Link | None) -> Iterator[Grant]:
        """Return the grants with their tokens. One that was posted on an earlier link than this is worth nothing."""
        for grant in grants:
            posted = self._posted.get(grant.receive)
            if posted is not None and posted.link is link:
                yield Grant(grant.receive, grant.step, grant.block, grant.first, grant.tiles, posted.token)

    def _deliver(self, action: engine_actions.Deliver) -> None:
        call = self._ends(action.client, action.request)
        if call is None:
            return
        if self.meter is not None:
            self.meter.delivered(call, action.elapsed)
        region, lease = action.region, action.lease
        data, buffer, offset, nbytes = None, -1, 0, 0
        if region is not None:
            nbytes = region.nbytes
            if lease:
                buffer, offset = region.buffer, region.offset
            else:
                data = self._arenas.view(region)
        result = Result(data, buffer, offset, nbytes, lease, action.participants, action.algorithm, action.elapsed)
        self._clients.delivered(action.client, action.request, result)
        if data is not None:
            data.release()

    def _fail(self, action: engine_actions.Fail) -> None:
        call = self._ends(action.client, action.request)
        if call is not None:
            self._call_failed(call, action.error)

    def _call_failed(self, call: engine_events.Submitted, error: AllReducedError) -> None:
        self._chronicle.failed(call, error)
        if self.meter is not None:
            self.meter.failed(call, error)
        self._clients.failed(call.client, call.request, error)

    def _ends(self, client: int, request: int) -> engine_events.Submitted | None:
        """Note the end of a call and return it; None if it ended before, which would be a defect."""
        call = self._submitted.pop((client, request), None)
        if call is None:
            logger.error("event=ended_twice client=%d request=%d", client, request)
        return call

    def _give_up(self, action: engine_actions.GiveUp) -> None:
        self.membership_event(membership_events.GiveUp(action.group, action.error))

    # Actions of the memberships

    def _admit(self, action: membership_actions.Admit) -> None:
        self._clients.admitted(action.client, action.request, action.rank, action.started)

    def _reject(self, action: membership_actions.Reject) -> None:
        self._clients.failed(action.client, action.request, action.error)

    def _tell_engine(self, action: membership_actions.TellEngine) -> None:
        event = action.event
        if isinstance(event, engine_events.GroupStarted):
            self._groups[event.group] = event
        elif isinstance(event, engine_events.GroupForgotten):
            self._groups.pop(event.group, None)
        self._chronicle.told(event)
        # At once, for what the engine says about it must go out before what the memberships say next: that a rank
        # left, say, when others must know first what it had called.
        self._handle(self._engine.handle, event)

    def _tell_clients(self, action: membership_actions.TellClients) -> None:
        self._clients.group_ended(action.clients, action.group, action.error)

    # Defects

    def _event_failed(self, event: Event) -> None:
        """End what an event was about, for nobody knows what state its handling left behind."""
        error = defect()
        self._break_groups(touched_by_event(event, self._groups), error)
        match event:
            case engine_events.Submitted(client=client, request=request):
                call = self._submitted.pop((client, request), None)
                if call is not None:
                    self._call_failed(call, error)
            case membership_events.ClientJoining(client=client, request=request):
                self._clients.failed(client, request, error)
            case _:
                pass

    def _action_failed(self, action: Action) -> None:
        """End what an action was for, and tell the engine that its memory is free."""
        error = defect()
        self._break_groups(touched_by_action(action, self._groups, self._arenas.group_of), error)
        match action:
            case engine_actions.Reduce(job=job):
                self._jobs.pop(job, None)
                self.engine_event(engine_events.Reduced(job))
            case engine_actions.Send(send=send):
                self._outgoing.pop(send, None)
                self.engine_event(engine_events.Sent(send))
            case engine_actions.CreateArena(buffer=buffer):
                self.engine_event(engine_events.ArenaFailed(buffer, error))
            case engine_actions.Deliver(client=client, request=request):
                self._clients.failed(client, request, error)
            case _:
                pass

    def _break_groups(self, groups: Iterable[int], error: AllReducedError) -> None:
        """End groups on this node at once, and have the memberships tell the others."""
        for group in groups:
            started = self._groups.pop(group, None)
            if started is None:
                continue
            self._chronicle.broken(group, error)
            self.engine_event(engine_events.GroupBroken(group, error))
            self._clients.group_ended(tuple(started.local.values()), group, error)
            self.membership_event(membership_events.GiveUp(group, error))


def _stopping() -> AgentUnavailable:
    return AgentUnavailable("this node's agent is stopping and takes nothing new", hint="start it again, then retry")
