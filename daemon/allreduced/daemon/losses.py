"""Who is lost, and the error that every rank gets for it: made from the losses alone, so it is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.errors import AllReducedError, GroupChanged, PeerLost, RankLost, WireError, to_wire
from allreduced.protocol.change import Loss

_SHOWN = 8
_LONG = 64
_SHORT_TEXT = 160


def error_of(losses: Sequence[Loss]) -> AllReducedError:
    """Return the error of a group that ended with these losses: PeerLost if an agent is lost, else RankLost.

    It names all lost nodes and ranks, and says of each how it was lost. Without losses it is GroupChanged: the members
    had more in doubt than they could tell each other.
    """
    if not losses:
        return GroupChanged(
            "the group ended: more of its operations were in doubt than its agents can agree on",
            hint="form the group anew",
        )
    ranks = sorted({rank for loss in losses for rank in loss.ranks})
    whole = [loss.node for loss in losses if loss.whole]
    causes = list(dict.fromkeys(loss.error[1] for loss in losses))
    message = "; ".join(causes[:_SHOWN])
    if len(causes) > _SHOWN:
        message += f"; … ({len(losses)} losses in all)"
    hint = next((loss.error[2] for loss in losses if loss.error[2]), "")
    if whole:
        return PeerLost(message, nodes=whole, ranks=ranks, hint=hint)
    return RankLost(message, ranks=ranks, nodes=sorted({loss.node for loss in losses}), hint=hint)


def brief(error: AllReducedError) -> WireError:
    """Return the error of a loss as it travels: without facts, which the loss itself has."""
    code, message, hint, _ = to_wire(error)
    return (code, message, hint, {})


def bounded(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """Return the losses with short texts where there are very many, so that they fit into a frame."""
    if len(losses) <= _LONG:
        return tuple(losses)
    return tuple(
        Loss(loss.node, loss.ranks, loss.whole, loss.proven, (loss.error[0], loss.error[1][:_SHORT_TEXT], "", {}))
        for loss in losses
    )
