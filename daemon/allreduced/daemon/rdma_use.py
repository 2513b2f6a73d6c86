"""Whether this agent uses RDMA: decided once, at its start, from the settings and what the machine has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from allreduced.core.errors import ConfigError
from allreduced.daemon.carrier import TCP, Carriage
from allreduced.daemon.settings import Settings
from allreduced.transports.rdma.checks import Finding, Needs, findings
from allreduced.transports.rdma.host import HostFacts, device_names, host_facts
from allreduced.transports.rdma.verbs_port import DeviceInfo

logger = logging.getLogger("allreduced.agent")


def decide(wanted: str, found: Sequence[Finding]) -> Carriage:
    """Return what carries data. ``wanted``: the setting ``peers.transport``; ``found``: those of :func:`examine`. Pure.

    :raises ConfigError: RDMA is asked for and cannot be used; hint and message say what mends it.
    """
    if wanted == TCP:
        return Carriage(TCP)
    serious = [one for one in found if one.serious]
    if not serious:
        return Carriage(wanted)
    first = serious[0]
    if wanted == "auto":
        return Carriage(TCP, first.message, "" if first.subject == "absent" else first.hint)
    raise ConfigError(
        f"peers.transport is {wanted}, and RDMA cannot be used: {'; '.join(one.message for one in serious)}",
        path="peers.transport",
        hint=first.hint,
    )


@dataclass(frozen=True, slots=True)
class Examined:
    """What is wrong, and the devices as verbs tell of them; none where verbs could not be asked."""

    findings: tuple[Finding, ...]
    devices: tuple[DeviceInfo, ...] = ()


def examine(settings: Settings, arenas: int) -> Examined:
    """Look whether this machine has what RDMA as the settings want it needs; ``arenas``: bytes of all shared memory.

    Where the kernel has no RDMA device, that costs a look at one directory.
    """
    needs = Needs(
        arenas=arenas,
        tile=settings.engine.tile_bytes,
        flows=settings.peers.flows,
        options=settings.rdma_options,
        peers=len(settings.peers.static),
    )
    if not device_names():
        return Examined(findings(HostFacts((), "missing", None), None, needs))
    host = host_facts()
    of_host = findings(host, None, needs)
    if any(one.serious for one in of_host):
        return Examined(of_host)
    from allreduced.transports.rdma.verbs import load

    try:
        devices = tuple(load().devices())
    except ConfigError as error:  # pyverbs is there, but its libraries cannot be loaded
        return Examined((Finding("binding", True, error.message, error.hint), *of_host))
    return Examined(findings(host, devices, needs), devices)


def choose(settings: Settings, arenas: int) -> Carriage:
    """Examine this machine and decide; what is wrong and lets RDMA be used all the same is logged.

    :raises ConfigError: as :func:`decide`.
    """
    if settings.peers.transport == TCP:
        return Carriage(TCP)
    found = examine(settings, arenas).findings
    carriage = decide(settings.peers.transport, found)
    for one in found:
        if not one.serious:
            logger.warning("event=rdma_limited reason=%r hint=%r", one.message, one.hint)
    return carriage
