"""What the agent asks of the machine: memory that can be shared, descriptors, kernels, processors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allreduced.core.errors import AllReducedError
from allreduced.daemon.arena import Arena, ArenaKind
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, warning
from allreduced.daemon.memory_share import available_memory, default_total, usable_memory
from allreduced.daemon.settings import Settings
from allreduced.daemon.sizes import size_text

ENOUGH_DESCRIPTORS: Final = 4096
"""Open files below which many clients or groups get LimitExceeded."""

BASE_MEMORY: Final = 256 << 20
"""Bytes that an agent takes beside its arenas, with room."""

_SLOW_SETS: Final = ("baseline",)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What there is. Bytes, except where said. ``descriptors``: soft and hard limit, None for no limit.

    ``arena_error``: why no sealed shared memory can be made, empty where it can. ``kernels``: the instruction set of
    the reduction kernels, empty where they cannot be loaded: ``kernels_error`` then says why. ``arenas``: what they may
    take together. ``control_group``: its memory limit, or the machine's memory. ``cpus``: that this process may use.
    """

    descriptors: tuple[int | None, int | None]
    arena_error: str
    kernels: str
    kernels_error: str
    arenas: int
    control_group: int
    available: int | None
    cpus: int
    threads: int
    overcommit: str


def machine_facts(settings: Settings) -> MachineFacts:
    """Look at the machine. Makes a small arena and closes it again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kernels, kernels_error = _kernels()
    return MachineFacts(
        descriptors=(_limit(soft), _limit(hard)),
        arena_error=_arena_error(),
        kernels=kernels,
        kernels_error=kernels_error,
        arenas=settings.limits.arena_bytes or default_total(),
        control_group=usable_memory(),
        available=available_memory(),
        cpus=len(os.sched_getaffinity(0)),
        threads=settings.engine.threads,
        overcommit=_read("/proc/sys/vm/overcommit_memory"),
    )


def judge_machine(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what is to be said about a machine. Pure."""
    if facts.arena_error:
        yield problem(
            "shared memory",
            f"no sealed memory can be made: {facts.arena_error}",
            "in a container, allow memfd_create and fcntl seals (a seccomp profile may forbid them); else raise the"
            " memory limit",
        )
    else:
        yield ok("shared memory", "memfd, seals and populating work")
    yield from _descriptors(facts)
    yield from _memory(facts)
    yield from _processors(facts)


def _descriptors(facts: MachineFacts) -> Iterator[Finding]:
    soft, hard = facts.descriptors
    best = hard if soft is not None else None
    if best is not None and best < ENOUGH_DESCRIPTORS:
        yield warning(
            "descriptors",
            f"a process may open {best} files at most; each client and each result arena takes one",
            "systemd: LimitNOFILE=65536 in the unit; a shell: ulimit -Hn 65536; Docker: --ulimit nofile=65536",
        )
    else:
        yield ok("descriptors", f"a process may open {'any number of' if best is None else best} files")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    arenas, limit = facts.arenas, facts.control_group
    told = f"arenas may take {_size(arenas)} together, of {_size(limit)} that this process may use"
    lower = f"set limits.arena_bytes to {_size(max(limit // 2, 1))} or less, or raise the memory limit of the agent"
    if arenas + BASE_MEMORY > limit:
        yield problem("memory", f"{told}: the kernel kills the agent before its own limit is reached", lower)
    elif arenas > 0.8 * limit:
        yield warning("memory", f"{told}, which leaves little for anything else", lower)
    else:
        yield ok("memory", told)
    if facts.available is not None and facts.available < min(arenas, limit) // 4:
        yield warning(
            "memory",
            f"only {_size(facts.available)} are free now: arenas will be refused before their limit",
            "free memory on this machine, or lower limits.arena_bytes so that the refusal names that limit",
        )
    if facts.overcommit == "2":
        yield note(
            "memory",
            "the kernel does not overcommit (vm.overcommit_memory = 2): all arenas count as used",
            "sysctl -w vm.overcommit_memory=0, or leave it where the machine has memory for all arenas",
        )


def _processors(facts: MachineFacts) -> Iterator[Finding]:
    if facts.kernels_error:
        yield problem(
            "kernels",
            f"the reduction kernels cannot be loaded: {facts.kernels_error}",
            "pip install --force-reinstall 'allreduced[agent]'",
        )
    elif facts.kernels in _SLOW_SETS:
        yield note("kernels", f"reductions use {facts.kernels}: this processor offers nothing wider")
    else:
        yield ok("kernels", f"reductions use {facts.kernels}")
    if facts.threads > facts.cpus:
        yield warning(
            "processors",
            f"engine.threads is {facts.threads}, and this process may use {facts.cpus} CPUs",
            f"set engine.threads to {facts.cpus} or 0, or give the agent more CPUs",
        )
    elif facts.cpus == 1:
        yield warning(
            "processors",
            "the agent shares one CPU with everything else here",
            "give the agent a CPU of its own (systemd: CPUAffinity=, Docker: --cpuset-cpus)",
        )
    else:
        yield ok("processors", f"{facts.cpus} CPUs")


def _arena_error() -> str:
    for kind in (ArenaKind.INPUT, ArenaKind.RESULT):
        try:
            arena = Arena.create(kind, 1 << 16)
        except AllReducedError as error:
            return error.message
        arena.close_descriptor()
        arena.close()
    return ""


def _kernels() -> tuple[str, str]:
    try:
        from allreduced.daemon.kernels import _native
    except ImportError as error:
        return "", str(error)
    return _native.instruction_set(), ""


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _size(nbytes: int) -> str:
    """Return a size that people read: rounded to MiB where it is large."""
    return size_text(nbytes >> 20 << 20) if nbytes >= 1 << 20 else size_text(nbytes)
