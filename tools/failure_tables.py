"""Writes the tables of docs/failure.md from those of the code: ``make docs``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_type_hints

from allreduced.daemon.engine.operation import STATES as OPERATIONS
from allreduced.daemon.membership.change import MESSAGES, TURNS, Phase
from allreduced.daemon.membership.instance import STATES
from allreduced.daemon.membership.liveness import TABLE, PeerState, Sign
from allreduced.daemon.membership.scene import Standing
from allreduced.daemon.timing import Timing, derived

PAGE = Path(__file__).parents[1] / "docs" / "failure.md"

_MARKED = re.compile(r"(<!-- table (\w+)[^>]* -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def page(text: str) -> str:
    """Return the page with each table between its marks made anew.

    :raises KeyError: a mark names a table that there is not.
    """
    tables = _tables()
    return _MARKED.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", text)


def names(text: str) -> list[str]:
    """Return the names of the tables on the page, in order."""
    return [found[2] for found in _MARKED.finditer(text)]


def _tables() -> Mapping[str, str]:
    return {
        "times": _table(("time", "default", "what"), _times()),
        "peers": _table(("state", "what is known"), ((_name(state), state.value) for state in PeerState)),
        "signs": _table(("sign", "what happens"), ((_name(sign), sign.value) for sign in Sign)),
        "detection": _table(("state", "sign", "next state", "the memberships are told"), _detection()),
        "standings": _table(("standing", "what is known of the member"), ((_name(one), one.value) for one in Standing)),
        "instances": _table(("state", "meaning"), ((f"`{state.value}`", text) for state, text in STATES.items())),
        "operations": _table(("state", "meaning"), ((f"`{state.value}`", text) for state, text in OPERATIONS.items())),
        "phases": _table(("phase", "meaning"), ((_name(phase), phase.value) for phase in Phase)),
        "turns": _table(("phase", "what happens", "next phase", "what it does"), _turns()),
        "messages": _table(("frame", "who sends it", "what the receiver does"), _messages()),
    }


def _times() -> Iterable[tuple[str, ...]]:
    timing = derived(5.0)
    hints = get_type_hints(Timing, include_extras=True)
    for field in dataclasses.fields(timing):
        yield f"`{field.name}`", f"{getattr(timing, field.name):g} s", hints[field.name].__metadata__[0]


def _detection() -> Iterable[tuple[str, ...]]:
    for (state, sign), step in TABLE.items():
        tells = ", ".join(f"`{tell.value}`" for tell in step.tells)
        yield _name(state) if state is not None else "not known", _name(sign), _name(step.state), tells


def _turns() -> Iterable[tuple[str, ...]]:
    for (phase, happens), (following, does) in TURNS.items():
        yield _name(phase), happens, _name(following), does


def _messages() -> Iterable[tuple[str, ...]]:
    for frame, (sender, receiver) in MESSAGES.items():
        yield f"`{frame.__name__}`", sender, receiver


def _name(item: PeerState | Sign | Standing | Phase) -> str:
    return item.name.replace("_", " ")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return (
        "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
