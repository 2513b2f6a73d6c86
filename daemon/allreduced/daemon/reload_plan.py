"""What of changed settings holds at once, and what only after a restart: a pure function of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from allreduced.daemon.settings import SECTIONS, Settings

AT_RUN_TIME: frozenset[str] = frozenset(
    {
        "agent.log_level",
        "peers.static",
        "access.users",
        "access.groups",
        "access.job_secrets",
        "security.ca",
        "security.certificate",
        "security.key",
        "limits.arena_bytes_per_client",
        "limits.arena_bytes_per_user",
        "limits.arenas_per_client",
        "limits.clients",
        "limits.clients_per_user",
        "limits.requests",
        "limits.requests_per_user",
        "limits.groups",
        "limits.groups_per_user",
        "limits.streams",
        "limits.peers",
        "limits.operations",
        "limits.names",
        "limits.lease_bytes",
        "limits.leases",
        "limits.outgoing_bytes",
        "limits.outgoing_messages",
        "limits.hello_timeout",
    }
)
"""Settings that a running agent takes over. ``limits.requests``, ``limits.groups``, ``limits.streams``,
``limits.outgoing_*`` and ``access`` hold for new connections."""

_CERTIFICATES = frozenset({"security.ca", "security.certificate", "security.key"})
_SECRETS = frozenset({"security.secret"})


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs, both values as they are written; a secret is masked."""

    setting: str
    old: str
    new: str
    why: str = ""
    """Why it needs a restart, where that is not plain."""


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """What to do. ``settings``: what is in force afterwards, the old ones with what is ``applied``."""

    settings: Settings
    applied: tuple[Change, ...] = field(default=())
    restart: tuple[Change, ...] = field(default=())

    def describe(self) -> str:
        """Return in a few words what came of it."""
        if not self.applied and not self.restart:
            return "nothing changed"
        said = []
        if self.applied:
            said.append(f"changed: {', '.join(change.setting for change in self.applied)}")
        if self.restart:
            said.append(f"needs a restart: {', '.join(change.setting for change in self.restart)}")
        return "; ".join(said)


def plan_reload(old: Settings, new: Settings) -> ReloadPlan:
    """Return what becomes of ``new`` in an agent that runs with ``old``."""
    applied: list[Change] = []
    restart: list[Change] = []
    sections = {}
    for name in SECTIONS:
        before, after = getattr(old, name), getattr(new, name)
        taken = {}
        for key in before.__struct_fields__:
            was, wanted = getattr(before, key), getattr(after, key)
            if was == wanted:
                continue
            setting = f"{name}.{key}"
            why = _why_not(setting, old, new)
            change = Change(setting, _written(setting, was), _written(setting, wanted), why)
            if setting in AT_RUN_TIME and not why:
                applied.append(change)
                taken[key] = wanted
            else:
                restart.append(change)
        sections[name] = msgspec.structs.replace(before, **taken)
    return ReloadPlan(msgspec.structs.replace(old, **sections), tuple(applied), tuple(restart))


def _why_not(setting: str, old: Settings, new: Settings) -> str:
    """Return why a setting that can change at run time cannot this time; empty where it can."""
    peers = old.peers
    if setting == "peers.static" and not (peers.listen or peers.static or peers.dns):
        return "this agent has no peers and listens nowhere"
    if setting in _CERTIFICATES and (old.security.mode != "mtls" or new.security.mode != "mtls"):
        return "security.mode is not mtls"
    return ""


def _written(setting: str, value: object) -> str:
    if setting in _SECRETS:
        return "********" if value else '""'
    if setting == "peers.static" and isinstance(value, tuple):
        return ",".join(f"{peer.node}={peer.address}" for peer in value) or "-"
    return str(value)
