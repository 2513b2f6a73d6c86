"""What ``allreduced run`` starts: the description of a job, and the environments of its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

_OF_ONE_PROCESS = (
    "ALLREDUCED_AGENT",
    "ALLREDUCED_CHANNEL",
    "ALLREDUCED_JOIN",
    "ALLREDUCED_JOB",
    "ALLREDUCED_LOCAL_RANK",
    "ALLREDUCED_LOCAL_SIZE",
    "ALLREDUCED_NODE",
    "ALLREDUCED_NODES",
    "ALLREDUCED_RANK",
    "ALLREDUCED_SECRET",
    "ALLREDUCED_SIZE",
    "ALLREDUCED_SOCKET",
)
"""Variables that say who a process is and whom it talks to; those of an outer job must not leak into an inner one."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job on this machine: ``nodes`` private agents with ``ranks_per_node`` processes of ``command`` each.

    ``environment``: extra variables for ranks and agents. ``grace``: seconds between SIGTERM and SIGKILL.
    ``channel``: a descriptor that rank 0 inherits, named by ``CHANNEL_VARIABLE``; -1 for none.
    ``agent_program``: the command that runs an agent; empty for ``allreduced agent`` of this interpreter.
    """

    command: tuple[str, ...]
    nodes: int = 1
    ranks_per_node: int = 1
    agent_arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    prefix: bool = True
    grace: float = 5.0
    channel: int = -1
    agent_program: tuple[str, ...] = ()
    name: str = field(default_factory=lambda: f"run-{secrets.token_hex(6)}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the index of the node that holds ``rank``: ranks are dealt out in order."""
        return rank // self.ranks_per_node

    def socket(self, node: int) -> str:
        """Return the socket of the node's agent, in the abstract namespace: it leaves no file behind."""
        return f"@allreduced-{self.name}-{node_name(node)}"

    def to_json(self) -> bytes:
        """Return the job as one line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Job:
        """Return the job that :meth:`to_json` was called on."""
        values = json.loads(line)
        for key in ("command", "agent_arguments", "agent_program"):
            values[key] = tuple(values.get(key, ()))
        return cls(**values)


CHANNEL_VARIABLE = "ALLREDUCED_CHANNEL"
"""Names the descriptor on which rank 0 may send lines to the front of the job."""


def node_name(node: int) -> str:
    """Return the name of the ``node``-th agent of a job."""
    return f"node{node}"


def python_module(module: str) -> tuple[str, ...]:
    """Return the command that runs ``module`` with this interpreter, whatever lies in the working directory."""
    return (sys.executable, "-P", "-m", module)


def agent_command(job: Job, node: int, ready: int, join: str) -> tuple[str, ...]:
    """Return the command of the ``node``-th agent; ``ready``: descriptor of its ready line; ``join``: the first agent.

    The first agent itself is given an empty ``join``.
    """
    return (
        *(job.agent_program or (*python_module("allreduced.cli.main"), "agent")),
        "--socket",
        job.socket(node),
        "--node",
        node_name(node),
        "--listen",
        "tcp://127.0.0.1:0",
        "--ready-fd",
        str(ready),
        *(("--join", join) if join else ()),
        *job.agent_arguments,
    )


def agent_environment(job: Job, secret: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job's agents, the only processes that know the secret of the links."""
    environment = {key: value for key, value in base.items() if key not in _OF_ONE_PROCESS}
    return {**environment, **job.environment, "ALLREDUCED_SECRET": secret}


def rank_environment(job: Job, rank: int, master_port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ``rank``: who it is, in the words of allreduced and of torchrun.

    Two defaults that the caller's environment may override: Python writes unbuffered, so that output is seen when it is
    written, and numeric libraries share the cores between the ranks.
    """
    node, local_rank = divmod(rank, job.ranks_per_node)
    cores = len(os.sched_getaffinity(0))
    environment = {key: value for key, value in base.items() if key not in _OF_ONE_PROCESS}
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, cores // job.size)),
        **environment,
        "ALLREDUCED_AGENT": "require",
        "ALLREDUCED_JOB": job.name,
        "ALLREDUCED_RANK": str(rank),
        "ALLREDUCED_SIZE": str(job.size),
        "ALLREDUCED_LOCAL_RANK": str(local_rank),
        "ALLREDUCED_LOCAL_SIZE": str(job.ranks_per_node),
        "ALLREDUCED_NODE": str(node),
        "ALLREDUCED_NODES": str(job.nodes),
        "ALLREDUCED_SOCKET": job.socket(node),
        "RANK": str(rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        **({CHANNEL_VARIABLE: str(job.channel)} if job.channel >= 0 and rank == 0 else {}),
        **job.environment,
    }
