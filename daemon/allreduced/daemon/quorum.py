"""Who may decide for a group: the one rule that agreements and deliveries share."""

from __future__ import annotations

from collections.abc import Set


def has_quorum(members: int, votes: Set[int], departed: Set[int]) -> bool:
    """Tell whether ``votes`` may decide for a generation of ``members`` members (their places; place 0: lowest rank).

    ``departed``: those that are proven to be dead, or said goodbye; they can never vote again. All others together
    decide, else more than half of all members, or exactly half with place 0. Any two quorums then have a member in
    common that lives, or nobody who lives has seen what the first one decided.
    """
    voting = {place for place in votes if 0 <= place < members and place not in departed}
    if len(voting) == members - len({place for place in departed if 0 <= place < members}):
        return True
    twice = 2 * len(voting)
    return twice > members or (twice == members and 0 in voting)
