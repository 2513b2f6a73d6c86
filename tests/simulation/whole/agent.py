"""One start of a simulated agent: the real engine and the real memberships, and between them what the driver does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tests.simulation.whole.history import History, Seat
from tests.simulation.whole.plane import Plane
from tests.simulation.whole.process import Process
from tests.simulation.whole.scenario import Sizes
from tests.simulation.whole.wire import End, Wire
from tests.simulation.whole.workshop import Workshop

if TYPE_CHECKING:
    from tests.simulation.whole.client import SimulatedClient

from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.daemon.engine import actions as engine_actions
from allreduced.daemon.engine import events as engine_events
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.membership import actions as membership_actions
from allreduced.daemon.membership import events as membership_events
from allreduced.daemon.membership.liveness import Verdict
from allreduced.daemon.membership.membership import Membership
from allreduced.daemon.timing import Timing
from allreduced.protocol import change, peer

_Action: TypeAlias = "engine_actions.Action | membership_actions.Action"
_Event: TypeAlias = "engine_events.Event | membership_events.Event"

_GRANTING = (peer.Ready, peer.MoreGrants, peer.Fetch)
_OF_CHANGES = (change.Trouble, change.Prepare, change.Promise, change.Accept, change.Accepted, change.Committed)
_OF_MEMBERSHIPS = (
    peer.Announce,
    peer.Retract,
    peer.Refuse,
    peer.Form,
    peer.Broken,
    peer.Left,
    *_OF_CHANGES,
)


class Watch(Protocol):
    """The run, as an agent sees it."""

    wire: Wire
    history: History

    def sends(self, source: str, target: str, frame: peer.Frame) -> None:
        """Take note of a frame before it goes out."""

    def delivers(self, seat: Seat, agent: SimulatedAgent) -> None:
        """Take note that a result is about to be delivered."""


class SimulatedAgent:
    """Handles one event at a time, as the driver does, and everything that the pure parts want done."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        process: Process,
        watch: Watch,
        sizes: Sizes,
        timing: Timing,
        seed: str,
    ) -> None:
        rng = random.Random(seed)
        self.node = node
        self.incarnation = incarnation
        self.process = process
        self.draining = False
        self.attached: dict[int, SimulatedClient] = {}
        """The client processes, by number."""
        self.engine = Engine(node, _limits(sizes, timing))
        self.membership = make_membership(node, incarnation, sizes.tile, partial(rng.getrandbits, 63), timing)
        self.workshop = Workshop(process, rng, self.engine_event, sizes.arena)
        self.plane = Plane(node, incarnation, process, watch.wire, rng, timing, self)
        self._watch = watch
        self._history = watch.history
        self._seats: dict[int, Seat] = {}
        self._incarnations: dict[str, int] = {}
        self._queue: deque[tuple[Callable[..., Iterable[_Action]], _Event]] = deque()
        self._busy = False
        self._running = False
        self._submitted: dict[tuple[int, int], tuple[int, str, int]] = {}
        self._uses: dict[tuple[int, int, str], int] = {}
        self._timers = [
            _Timer(process, lambda: self.engine_event(engine_events.TimePassed())),
            _Timer(process, lambda: self.membership_event(membership_events.TimePassed())),
        ]
        engine_timer, membership_timer = self._timers
        workshop = self.workshop
        self._do: dict[type, Callable[..., None]] = {
            engine_actions.CreateArena: workshop.create,
            engine_actions.DestroyArena: lambda action: workshop.destroy(action.buffer),
            engine_actions.Reduce: workshop.reduce,
            engine_actions.PostReceive: self._post_receive,
            engine_actions.CancelReceive: lambda action: workshop.cancel_receive(action.receive),
            engine_actions.Send: self._send,
            engine_actions.CancelSend: lambda action: workshop.cancel_send(action.send),
            engine_actions.SendFrame: self._send_operation_frame,
            engine_actions.Deliver: self._deliver,
            engine_actions.Fail: self._fail,
            engine_actions.Frozen: self._frozen,
            engine_actions.GiveUp: self._give_up,
            engine_actions.SetTimer: lambda action: engine_timer.set(action.at),
            membership_actions.SendFrame: lambda action: self._send_frame(action.node, action.frame),
            membership_actions.Admit: self._admit,
            membership_actions.Reject: self._reject,
            membership_actions.TellEngine: self._tell_engine,
            membership_actions.TellClients: self._tell_clients,
            membership_actions.SetTimer: lambda action: membership_timer.set(action.at),
        }

    @property
    def calls(self) -> list[tuple[int, str, int]]:
        """Operations that have not ended for a client: group, name, use."""
        return list(self._submitted.values())

    @property
    def idle(self) -> bool:
        """True where nothing is under way and no memory is used."""
        if any(self.workshop.busy) or self._submitted:
            return False
        return self.engine.idle and self.engine.snapshot()["memory"]["reserved_bytes"] == 0

    def close(self) -> None:
        """Begin to stop in order: goodbye, and nothing new."""
        self.draining = True
        self.gone()
        self.plane.close()

    def gone(self) -> None:
        """Take note that no seat here matters any more."""
        for seat in self._seats.values():
            ranks = next(member.ranks for member in seat.started.members if member.node == self.node)
            self._history.lose(seat.group, ranks, self.process.agenda.now)
            seat.gone_at = seat.gone_at if seat.gone_at is not None else self.process.agenda.now

    # Events

    def engine_event(self, event: engine_events.Event) -> None:
        """Give the engine an event."""
        if type(event) is engine_events.Submitted:
            if self.draining:
                stopping = AgentUnavailable("this node's agent is stopping and takes nothing new")
                self._answer(event.client, event.request, stopping)
                return
            number = (event.group, event.rank, event.name)
            use = self._uses[number] = self._uses.get(number, -1) + 1
            self._submitted[event.client, event.request] = (event.group, event.name, use)
        self._queue.append((self.engine.handle, event))
        if not self._busy:
            self._run()

    def membership_event(self, event: membership_events.Event) -> None:
        """Give the memberships an event."""
        if type(event) is membership_events.ClientJoining and self.draining:
            stopping = AgentUnavailable("this node's agent is stopping and takes nothing new")
            self._reject(membership_actions.Reject(event.client, event.request, stopping))
            return
        self._queue.append((self.membership.handle, event))
        if not self._busy:
            self._run()

    def _run(self) -> None:
        self._busy = True
        queue = self._queue
        try:
            while queue:
                self._handle(*queue.popleft())
        finally:
            self._busy = False

    def _handle(self, handle: Callable[..., Iterable[_Action]], event: _Event) -> None:
        do, process = self._do, self.process
        for action in handle(event, process.now()):
            if not process.alive:  # a fault that waited for a frame
                self._queue.clear()
                break
            do[type(action)](action)

    # What the peer plane tells

    def verdict(self, verdict: Verdict) -> None:
        """Take what the failure detector says."""
        self._note("liveness", verdict)
        self._history.counts[type(verdict).__name__] += 1
        self._check_gone(verdict)
        self.membership_event(verdict)

    def heard(self, nodes: tuple[str, ...]) -> None:
        """Take note of signs of life."""
        self.engine_event(engine_events.Heard(nodes))

    def frame(self, node: str, frame: peer.Frame) -> None:
        """Take a frame for one of the pure parts."""
        self._note(f"<- {node}", frame)
        if isinstance(frame, _OF_MEMBERSHIPS):
            self.membership_event(membership_events.FrameArrived(node, frame))
        else:
            self.engine_event(engine_events.FrameArrived(node, frame))  # type: ignore[arg-type]

    def echo(self, node: str, frame: peer.Frame) -> None:
        """Take a frame once more that came over a link before the present one.

        Only frames of a generation that is over, and those that change generations: no transport gives any others.
        """
        seat = self._seats.get(getattr(frame, "group", 0))
        if seat is None:
            return
        if isinstance(frame, _OF_CHANGES) or getattr(frame, "generation", 0) < seat.generation:
            self._history.counts["echoes"] += 1
            self.frame(node, frame)

    def data(self, end: End, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data."""
        self.workshop.land(end, token, offset, data, tag)

    def closed(self, end: End) -> None:
        """Take back what a connection still has."""
        self.workshop.closed(end)

    # Actions of the engine

    def _post_receive(self, action: engine_actions.PostReceive) -> None:
        end = self.plane.link(action.node)
        if end is not None:
            self.workshop.post(action, end)

    def _send(self, action: engine_actions.Send) -> None:
        end = self.plane.link(action.node)
        if end is None:
            self.engine_event(engine_events.Sent(action.send))
        else:
            self.workshop.send(action, end)

    def _send_operation_frame(self, action: engine_actions.SendFrame) -> None:
        frame = action.frame
        if isinstance(frame, _GRANTING) and frame.grants:
            token = self.workshop.token
            grants = tuple(replace(grant, token=token(grant.receive)) for grant in frame.grants)
            frame = replace(frame, grants=grants)
        self._send_frame(action.node, frame)

    def _send_frame(self, node: str, frame: peer.Frame) -> None:
        self._watch.sends(self.node, node, frame)
        if self.process.alive:
            self.plane.send_frame(node, frame)

    def _deliver(self, action: engine_actions.Deliver) -> None:
        group, name, use = self._over(action.client, action.request)
        seat = self._seats[group]
        if (name, use) not in seat.delivered:
            self._watch.delivers(seat, self)
            seat.delivered[name, use] = (seat.generation, self.process.agenda.now)
        self._note("delivers", action)
        region = action.region
        if region is not None and action.lease:
            client = self.attached.get(action.client)
            if client is not None:
                client.leased(self, action.request, region, action.lease)
            return
        data = self.workshop.view(region).tobytes() if region is not None else None
        self._answer(action.client, action.request, data)

    def _fail(self, action: engine_actions.Fail) -> None:
        group, name, use = self._over(action.client, action.request)
        seat = self._seats.get(group)
        if seat is not None and action.client in self.attached:
            seat.failed.setdefault((name, use), (seat.generation, action.error, self.process.agenda.now))
        self._note("fails", action)
        self._answer(action.client, action.request, action.error)

    def _over(self, client: int, request: int) -> tuple[int, str, int]:
        what = self._submitted.pop((client, request), None)
        if what is None:
            raise AssertionError(f"request {request} of client {client} ended twice, or was never made")
        return what

    def _frozen(self, action: engine_actions.Frozen) -> None:
        self._note("frozen", action)
        self.membership_event(membership_events.Frozen(action))

    def _give_up(self, action: engine_actions.GiveUp) -> None:
        self._note("gives up", action)
        self._history.counts["gave up"] += 1
        self.membership_event(membership_events.GiveUp(action.group, action.error))

    # Actions of the memberships

    def _admit(self, action: membership_actions.Admit) -> None:
        client = self.attached.get(action.client)
        if client is not None:
            client.reply(self, partial(client.admitted, action.request, action.started, action.rank))

    def _reject(self, action: membership_actions.Reject) -> None:
        client = self.attached.get(action.client)
        if client is not None:
            client.reply(self, partial(client.rejected, action.request, action.error))

    def _answer(self, number: int, request: int, answer: AllReducedError | bytes | None) -> None:
        client = self.attached.get(number)
        if client is not None:
            client.ended(self, request, answer)

    def _tell_clients(self, action: membership_actions.TellClients) -> None:
        self._note("group ended", action)
        for number in action.clients:
            client = self.attached.get(number)
            if client is not None:
                client.reply(self, partial(client.group_ended, action.group, action.error))

    def _tell_engine(self, action: membership_actions.TellEngine) -> None:
        self._note("engine is told", action.event)
        self._engine_learns(action.event)
        self._handle(self.engine.handle, action.event)

    def _engine_learns(self, event: _Event) -> None:
        """Write down what the engine is told of a group, at the moment when it is."""
        now, history = self.process.agenda.now, self._history
        if isinstance(event, engine_events.GroupStarted):
            seat = Seat(self.node, self.incarnation, self.process, event, now, event.generation, event.members)
            self._seats[event.group] = history.seats[event.group, self.node, self.incarnation] = seat
            seat.gone_at = now if self.plane.closing else None
            history.counts["groups started"] += 1
            return
        known = self._seats.get(getattr(event, "group", 0))
        if known is None:
            return
        match event:
            case engine_events.GroupForgotten():
                known.gone_at = known.gone_at if known.gone_at is not None else now
            case engine_events.NodeDeparted(node=node):
                known.departed.add(node)
            case engine_events.Freeze():
                history.counts["freezes"] += 1
            case engine_events.GroupBroken(error=error):
                history.counts["groups broken"] += 1
                known.error = known.error or error
                known.cut_off = known.cut_off if known.cut_off is not None else now
            case engine_events.Changed(generation=generation, change=change):
                history.counts["changes installed"] += 1
                history.changes.setdefault((event.group, generation), []).append((known, change, now))
                included = any((one.node, one.incarnation) == (self.node, self.incarnation) for one in change.members)
                if included and known.cut_off is None:
                    known.installed[generation] = (change, now)
                    known.generation, known.members = change.generation, change.members
                    known.ended = known.ended or change.ended
                else:
                    known.learned = known.learned or (change, now)
                    known.cut_off = known.cut_off if known.cut_off is not None else now

    def _note(self, what: str, about: object) -> None:
        self._history.log.append((self.process.agenda.now, self.node, what, about))

    def _check_gone(self, verdict: Verdict) -> None:
        """Check that a proof is true: the start of the agent that was known here has ended, or is about to."""
        if isinstance(verdict, membership_events.PeerUp):
            self._incarnations[verdict.node] = verdict.incarnation
        elif isinstance(verdict, membership_events.PeerDown) and verdict.proven:
            plane = self._watch.wire.hosts[verdict.node].agent
            same = plane is not None and plane.incarnation == self._incarnations.get(verdict.node)
            if plane is not None and same and not plane.closing and not self.plane.closing:
                self._history.violated("proof", f"{self.node} says of {verdict.node}, which lives: {verdict}")


def make_membership(node: str, incarnation: int, tile: int, draw: Callable[[], int], timing: Timing) -> Membership:
    """Return the memberships of an agent."""
    return Membership(node, incarnation, tile, draw, timing)


class _Timer:
    """The one timer of a pure part."""

    def __init__(self, process: Process, passed: Callable[[], None]) -> None:
        self._process = process
        self._passed = passed
        self._at: float | None = None
        self._planned: float | None = None

    def set(self, at: float | None) -> None:
        """Call at this time; forget the time that was set before."""
        self._at = at
        if at is not None and (self._planned is None or at < self._planned):
            self._planned = at
            self._process.at(at, self, partial(self._look, at))

    def _look(self, planned: float) -> None:
        if planned != self._planned:
            return
        self._planned = None
        at = self._at
        if at is None:
            return
        if at > self._process.now() + 1e-9:
            self.set(at)
        else:
            self._at = None
            self._passed()


def _limits(sizes: Sizes, timing: Timing) -> Limits:
    return Limits(
        inline_bytes=sizes.inline,
        arena_bytes=sizes.arena,
        scratch_bytes=sizes.scratch,
        arena_chunk=sizes.chunk,
        window_tiles=sizes.window,
        failure_timeout=timing.failure_timeout,
        confirm_seconds=timing.confirm,
    )
