"""What users are told when they cannot have, or lose, a rank."""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.errors import (
    AllReducedError,
    AuthenticationError,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    PeerLost,
    RankClaimed,
    RankLost,
)
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.losses import error_of
from allreduced.daemon.membership.gathering import Claim, sizes_by_rank
from allreduced.protocol.change import ChangeFrame, Loss, Trouble

_SHOWN = 16


def outside(key: GroupKey, rank: int, size: int, most: int) -> InvalidArgument:
    """Return the error for a rank or a size that cannot be."""
    if not 1 <= size <= most:
        return InvalidArgument(f"a group has 1 to {most} ranks, not {size}")
    return InvalidArgument(
        f"rank {rank} is outside of 0 … {size - 1}, the ranks of group {key.name!r}",
        hint="check rank and size, or the launcher's variables (RANK, WORLD_SIZE)",
    )


def claimed(key: GroupKey, holder: Claim) -> RankClaimed:
    """Return the error for a rank that ``holder`` has."""
    return RankClaimed(
        f"rank {holder.rank} of {_group(key)} is held by {holder.holder()}",
        rank=holder.rank,
        hint="two processes have one rank: check the launcher, or give the other job its own id (job=…)",
    )


def sizes_differ(key: GroupKey, claims: Sequence[Claim]) -> MismatchError:
    """Return the error for claims that expect different numbers of ranks."""
    sizes = sizes_by_rank(claims)
    said = ", ".join(f"rank {rank} says {size}" for rank, size in list(sizes.items())[:_SHOWN])
    return MismatchError(
        f"the ranks of {_group(key)} expect different sizes: {said}",
        field="size",
        by_rank=sizes,
        hint="start all ranks of a job with one world size; two jobs need two job ids",
    )


def stranger(key: GroupKey, claim: Claim, others: Sequence[int]) -> AuthenticationError:
    """Return the error for a claim whose job secret is not that of most ranks, which are ``others``."""
    gave = "another job secret" if claim.proof else "no job secret"
    return AuthenticationError(
        f"rank {claim.rank} of {_group(key)} gave {gave}, unlike rank(s) {_listed(others)} ({claim.holder()})",
        hint="give all ranks of a job the same connect(job_secret=…) or ALLREDUCED_JOB_SECRET, or use another job id",
    )


def not_gathered(key: GroupKey, size: int, missing: Sequence[int], strangers: Sequence[int] = ()) -> DeadlineExceeded:
    """Return the error for a group whose ranks did not come in time; ``strangers`` came with another job secret."""
    if strangers and missing:
        return DeadlineExceeded(
            f"{_group(key)} did not gather in time: rank(s) {_listed(missing)} of {size} never came with this job"
            f" secret; rank(s) {_listed(strangers)} gave another one",
            missing=missing,
            hint="give all ranks of a job the same connect(job_secret=…) or ALLREDUCED_JOB_SECRET",
        )
    if not missing:
        return DeadlineExceeded(
            f"{_group(key)} did not gather in time: every rank came, but not all at one time",
            hint="did processes of this job end, or were they started one after the other?",
        )
    return DeadlineExceeded(
        f"{_group(key)} did not gather in time: rank(s) {_listed(missing)} of {size} never came",
        missing=missing,
        hint="are these processes started, with the same job id, and do their agents reach this one?",
    )


def not_agreed(node: str, unreached: Sequence[str], silent: Sequence[str]) -> str:
    """Return why a proposal waits at ``node``: whom it cannot reach, else who has not consented."""
    if unreached:
        return f"agent {node!r} cannot reach {', '.join(unreached)}"
    return f"the agents of {', '.join(silent)} did not agree" if silent else ""


def not_formed(key: GroupKey, why: str, hint: str = "") -> DeadlineExceeded:
    """Return the error for a group whose agents did not agree in time. ``hint``: what helps about ``why``, if known."""
    return DeadlineExceeded(
        f"{_group(key)} did not form in time, though every rank came{'; ' if why else ''}{why}",
        hint=f"{hint}{'; ' if hint else ''}every agent must reach every other one",
    )


def rank_lost(node: str, claims: Sequence[Claim], how: str, doing: str = "") -> RankLost:
    """Return the error for processes of ``node`` that are gone; ``doing``: what they were doing, if it is known."""
    who = ", ".join(f"rank {claim.rank} ({claim.holder()})" for claim in claims)
    return RankLost(
        f"{who} {how}{', ' if doing else ''}{doing}",
        ranks=[claim.rank for claim in claims],
        nodes=(node,),
        hint="look at the output of that process, and whether it was killed; then form the group anew",
    )


def ranks_gone(node: str, ranks: Sequence[int]) -> RankLost:
    """Return the error for a proposal that names claims which are gone."""
    return RankLost(f"rank(s) {_listed(ranks)} on node {node!r} are gone", ranks=ranks, nodes=(node,))


def bound_elsewhere(node: str) -> RankLost:
    """Return the error for a proposal that names claims which are part of another one."""
    return RankLost(f"ranks on node {node!r} are bound to another proposal", nodes=(node,))


def peer_lost(node: str, ranks: Sequence[int], error: AllReducedError | None) -> PeerLost:
    """Return the error for an agent that is gone with its ranks."""
    how = error.message if error is not None else f"agent {node!r} stopped"
    return PeerLost(
        f"{how}; rank(s) {_listed(ranks)} are lost with node {node!r}",
        nodes=(node,),
        ranks=ranks,
        hint=error.hint if error is not None else "",
    )


def apart(node: str, others: Sequence[str], ranks: Sequence[int]) -> PeerLost:
    """Return the error for an agent that lives, but that others of the group and it do not hear."""
    heard = ", ".join(repr(other) for other in others[:_SHOWN])
    return PeerLost(
        f"agent {node!r} and agent(s) {heard} do not hear each other, so one side had to go;"
        f" rank(s) {_listed(ranks)} are lost with node {node!r}",
        nodes=(node,),
        ranks=ranks,
        hint="look at the network between these nodes",
    )


def stopped(node: str, ranks: Sequence[int]) -> PeerLost:
    """Return the error for an agent that stopped in order, and its ranks with it."""
    return PeerLost(
        f"agent {node!r} stopped in order; rank(s) {_listed(ranks)} left with it", nodes=(node,), ranks=ranks
    )


def not_in_group(node: str, ranks: Sequence[int] = ()) -> PeerLost:
    """Return the error for an agent that is asked about a group that it is not, or no more, a member of."""
    return PeerLost(f"agent {node!r} is not in the group any more", nodes=(node,), ranks=ranks)


def no_quorum(key: GroupKey, node: str, losses: Sequence[Loss]) -> PeerLost:
    """Return the error for a member that cannot reach enough of the others: whether they go on is not known here."""
    nodes = [loss.node for loss in losses]
    told = "; ".join(loss.error[1] for loss in losses[:_SHOWN])
    return PeerLost(
        f"agent {node!r} is cut off from {_group(key)}: {told}",
        nodes=nodes,
        ranks=sorted({rank for loss in losses for rank in loss.ranks}),
        hint="only a majority of the agents goes on (of two, the one with the lowest rank); form the group anew",
    )


def undecided(key: GroupKey, node: str, seconds: float, missing: Sequence[Member]) -> PeerLost:
    """Return the error for a member that gave up, because the others did not agree in time on what is in doubt."""
    who = ", ".join(repr(member.node) for member in missing[:_SHOWN])
    lacking = f"; it cannot reach {who}" if missing else ""
    return PeerLost(
        f"agent {node!r} gave up {_group(key)}: its agents did not agree within {seconds:g} s on who is left{lacking}",
        nodes=[member.node for member in missing],
        ranks=sorted({rank for member in missing for rank in member.ranks}),
        hint="does every agent reach every other one? form the group anew",
    )


def went_on_without(frame: ChangeFrame) -> AllReducedError:
    """Return the error for claims to a group that other members went on with, as a frame about its change tells."""
    losses = frame.losses if isinstance(frame, Trouble) else ()
    return error_of(losses) if losses else PeerLost("the agents of the group lost touch while it formed")


def _group(key: GroupKey) -> str:
    return f"group {key.name!r} of job {key.job!r}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return shown if len(ranks) <= _SHOWN else f"{shown}, … ({len(ranks)} in all)"
