"""Everything that the client reads from environment variables: who this process is, and which agent to use.

Pure functions of a mapping (and of a look into the process table, which tests replace), so that each launcher's
rules can be read and tested in one place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from allreduced.client.processes import launcher_identity, process_identity
from allreduced.core.addresses import Address, SocketAddress, is_loopback, parse_address, parse_socket
from allreduced.core.errors import ConfigError
from allreduced.core.limits import MAX_NAME, MAX_RANKS

Environment = Mapping[str, str]
LauncherId = Callable[[tuple[str, ...]], str]
"""Names this machine's launcher process; given the variables whose values tell a rank from its launcher."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher (or nobody) says about this process.

    ``job`` differs between two jobs of one user and between a crashed job and its rerun, as far as the launcher lets
    one tell. ``node_rank``, ``nodes``, ``master_addr``, ``master_port``: None where the launcher does not say.
    """

    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    nodes: int | None
    master_addr: str | None
    master_port: int | None
    launcher: str
    one_node: bool = True
    """All ranks of the job run on this node, also where the group in question is smaller than the job."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Which agent to use. ``socket``: asked for by name in ``source``; else ``places`` are tried in order.

    ``require``: never start a private agent. ``join``: where private agents of several nodes meet, or None. ``node``:
    how a private agent of this node is called; empty where that is made up.
    """

    socket: SocketAddress | None
    source: str
    places: tuple[str, ...]
    require: bool
    join: str | None
    node: str = ""


def read_launch(
    environ: Environment,
    *,
    job: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    launcher_id: LauncherId | None = None,
) -> Launch:
    """Return who this process is; arguments beat variables.

    Looks for `allreduced run`, torchrun, Open MPI, Slurm, PMI (MPICH, Intel MPI), then plain ``RANK``/``WORLD_SIZE``;
    a process that nobody launched is the only rank of its own job.

    :raises ConfigError: a variable has a bad value, the numbers contradict each other, or the job cannot be told.
    """
    identify = launcher_id or launcher_identity
    found = _detect(environ, identify, job_known=job is not None)
    if found is None:
        if (rank is None) != (size is None) and (rank or 0, size or 1) != (0, 1):
            missing = "size" if size is None else "rank"
            raise ConfigError(
                f"{missing} is not known: no launcher set it and connect() was not given it",
                path=missing,
                hint="pass both rank= and size=, or start the script with `allreduced run`, torchrun, srun or mpirun",
            )
        found = _checked(_unlaunched(rank or 0, size if size is not None else 1, identify))
    found = replace(found, one_node=found.size == found.local_size)
    if rank is not None or size is not None:
        # A group of some of the launcher's ranks: no more of it can be here than there are.
        _checked(found)
        size = found.size if size is None else size
        here = min(found.local_size, max(size, 1))
        found = replace(
            found,
            rank=found.rank if rank is None else rank,
            size=size,
            local_rank=min(found.local_rank, here - 1),
            local_size=here,
        )
    if local_rank is not None or local_size is not None:
        # One of the two without the other still says how many share this node at least.
        local_size = local_size if local_size is not None else max(found.local_size, (local_rank or 0) + 1)
        local_rank = local_rank if local_rank is not None else min(found.local_rank, local_size - 1)
        found = replace(
            found, local_rank=local_rank, local_size=local_size, one_node=found.one_node and local_size == found.size
        )
    if job is not None:
        found = replace(found, job=job)
    return _checked(found)


def read_agent(environ: Environment, launch: Launch, *, socket: str | None, agent: str | None) -> AgentSettings:
    """Return which agent to use. ``socket`` and ``agent`` are the arguments of ``connect``.

    :raises ConfigError: ``agent`` or ``ALLREDUCED_AGENT`` is neither ``auto`` nor ``require``, or a socket is empty.
    """
    mode, mode_source = agent, "agent"
    if mode is None:
        mode, mode_source = environ.get("ALLREDUCED_AGENT") or "auto", "ALLREDUCED_AGENT"
    if mode not in ("auto", "require"):
        raise ConfigError(f"{mode_source} is {mode!r}; it is 'auto' or 'require'", path=mode_source)
    source = "socket"
    if socket is None and environ.get("ALLREDUCED_SOCKET"):
        socket, source = environ["ALLREDUCED_SOCKET"], "ALLREDUCED_SOCKET"
    address = None if socket is None else parse_socket(socket, path=source)
    return AgentSettings(
        address,
        source,
        usual_places(environ),
        mode == "require",
        _join(environ, launch),
        environ.get("ALLREDUCED_AGENT_NODE", ""),
    )


def read_job_secret(environ: Environment, job_secret: str | bytes | None) -> bytes:
    """Return the secret of the job; empty where there is none. ``job_secret`` is the argument of ``connect``.

    :raises ConfigError: the argument is empty, or of another type.
    """
    if job_secret is None:
        return environ.get("ALLREDUCED_JOB_SECRET", "").encode(errors="surrogateescape")
    if not job_secret or type(job_secret) not in (str, bytes):
        raise ConfigError(
            "job_secret must be text or bytes, and not empty",
            path="job_secret",
            hint="leave it out where there is none",
        )
    return job_secret.encode() if isinstance(job_secret, str) else job_secret


def usual_places(environ: Environment) -> tuple[str, ...]:
    """Return where agents are looked for when none is named: the user's runtime directory, then the system's."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = (f"{runtime.rstrip('/')}/allreduced/agent.sock",) if runtime.startswith("/") else ()
    return (*own, SYSTEM_SOCKET)


SYSTEM_SOCKET = "/run/allreduced/agent.sock"


def _join(environ: Environment, launch: Launch) -> str | None:
    explicit = environ.get("ALLREDUCED_JOIN")
    if explicit:
        return parse_address(explicit, path="ALLREDUCED_JOIN").host_port
    if launch.one_node or launch.master_addr is None or launch.master_port is None:
        return None
    if launch.master_port >= 65535:
        raise ConfigError(
            f"MASTER_PORT is {launch.master_port}, so the port after it cannot be used by the agents",
            path="MASTER_PORT",
            hint="choose a lower MASTER_PORT or set ALLREDUCED_JOIN=host:port",
        )
    return Address("tcp", launch.master_addr.strip("[]"), launch.master_port + 1).host_port


# One function for each launcher. Each returns None where its variables are not there.


def _detect(environ: Environment, identify: LauncherId, *, job_known: bool) -> Launch | None:
    if "ALLREDUCED_RANK" in environ:
        return _own(environ, identify)
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        return _torchrun(environ, identify)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ, identify)
    if "PMI_RANK" in environ and "SLURM_STEP_ID" not in environ:
        return _pmi(environ, identify, job_known=job_known)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _plain(environ, identify)
    # Slurm also sets its variables in batch scripts and salloc shells; only srun's tasks have a step and a rank.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    return None


def _own(environ: Environment, identify: LauncherId) -> Launch:
    rank = _integer(environ, "ALLREDUCED_RANK")
    size = _integer(environ, "ALLREDUCED_SIZE", least=1)
    return Launch(
        job=environ.get("ALLREDUCED_JOB") or f"run-{identify(('ALLREDUCED_RANK', 'ALLREDUCED_SIZE'))}",
        rank=rank,
        size=size,
        local_rank=_integer(environ, "ALLREDUCED_LOCAL_RANK", default=rank),
        local_size=_integer(environ, "ALLREDUCED_LOCAL_SIZE", default=size, least=1),
        node_rank=_optional(environ, "ALLREDUCED_NODE"),
        nodes=_optional(environ, "ALLREDUCED_NODES", least=1),
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_optional(environ, "MASTER_PORT", least=1),
        launcher="allreduced",
    )


def _torchrun(environ: Environment, identify: LauncherId) -> Launch:
    launch = _plain(environ, identify, launcher="torchrun")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"torchrun-{environ['TORCHELASTIC_RUN_ID']}-{restart}-{launch.master_addr}-{launch.master_port}"
    if launch.size == launch.local_size:
        # The run id is "none" and the port 29500 unless the user says otherwise: only the launcher itself is unique.
        job += f"-{identify(('TORCHELASTIC_RUN_ID', 'RANK', 'MASTER_PORT'))}"
    return replace(launch, job=job)


def _plain(environ: Environment, identify: LauncherId, launcher: str = "env") -> Launch:
    rank = _integer(environ, "RANK")
    size = _integer(environ, "WORLD_SIZE", least=1)
    master_addr = environ.get("MASTER_ADDR") or None
    master_port = _optional(environ, "MASTER_PORT", least=1)
    # Without LOCAL_WORLD_SIZE: a remote master means one process for each node, as in Kubernetes.
    here = master_addr is None or is_loopback(master_addr)
    local_size = _integer(environ, "LOCAL_WORLD_SIZE", default=size if here else 1, least=1)
    local_rank = _integer(environ, "LOCAL_RANK", default=rank if here else 0)
    master = f"{master_addr}-{master_port}" if master_addr is not None else identify(("RANK", "WORLD_SIZE"))
    return Launch(
        job=f"env-{master}",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(local_size, local_rank + 1) if "LOCAL_WORLD_SIZE" not in environ else local_size,
        node_rank=_optional(environ, "GROUP_RANK"),
        nodes=_optional(environ, "GROUP_WORLD_SIZE", least=1),
        master_addr=master_addr,
        master_port=master_port,
        launcher=launcher,
    )


def _open_mpi(environ: Environment, identify: LauncherId) -> Launch:
    rank = _integer(environ, "OMPI_COMM_WORLD_RANK")
    size = _integer(environ, "OMPI_COMM_WORLD_SIZE", least=1)
    local_rank = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK", default=rank)
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", default=size, least=1)
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return Launch(
        job=f"ompi-{name or identify(('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'))}",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=None,
        nodes=1 if size == local_size else None,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_optional(environ, "MASTER_PORT", least=1),
        launcher="openmpi",
    )


def _slurm(environ: Environment) -> Launch:
    rank = _integer(environ, "SLURM_PROCID")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _integer(environ, size_name, least=1)
    node = _integer(environ, "SLURM_NODEID", default=0)
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    nodes = _integer(environ, nodes_name, default=1, least=1)
    tasks_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    counts = parse_tasks_per_node(environ[tasks_name], path=tasks_name) if tasks_name in environ else (size,)
    if node >= len(counts):
        raise ConfigError(f"{tasks_name} is {environ.get(tasks_name)!r}, but SLURM_NODEID is {node}", path=tasks_name)
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        raise ConfigError("SLURM_JOB_ID is not set in a Slurm step", path="SLURM_JOB_ID")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    return Launch(
        job=f"slurm-{job}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        rank=rank,
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID", default=0),
        local_size=counts[node],
        node_rank=node,
        nodes=nodes,
        master_addr=environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
        # The same for all ranks of a step, different for steps that share a node, and outside the ephemeral range.
        master_port=_optional(environ, "MASTER_PORT", least=1) or slurm_port(job, environ["SLURM_STEP_ID"]),
        launcher="slurm",
    )


def _pmi(environ: Environment, identify: LauncherId, *, job_known: bool) -> Launch:
    rank = _integer(environ, "PMI_RANK")
    size = _integer(environ, "PMI_SIZE", least=1)
    local_size = _integer(environ, "MPI_LOCALNRANKS", default=size, least=1)
    name = environ.get("PMI_JOBID") or environ.get("PMI_ID_JOB") or environ.get("HYDRA_JOBID")
    if not name and not job_known and size != local_size:
        raise ConfigError(
            "the launcher gives no job id (PMI_JOBID) and the job spans several nodes",
            path="PMI_JOBID",
            hint="pass connect(job=...) with a name that differs from run to run, or set PMI_JOBID",
        )
    name = name or (identify(("PMI_RANK", "PMI_SIZE")) if size == local_size else "")
    return Launch(
        job=f"pmi-{name}",
        rank=rank,
        size=size,
        local_rank=_integer(environ, "MPI_LOCALRANKID", default=rank),
        local_size=local_size,
        node_rank=None,
        nodes=1 if size == local_size else None,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_optional(environ, "MASTER_PORT", least=1),
        launcher="pmi",
    )


def _unlaunched(rank: int, size: int, identify: LauncherId) -> Launch:
    # A process alone is its own job; several without a launcher were started by one parent (multiprocessing, a test).
    job = f"single-{process_identity(os.getpid())}" if size == 1 else f"local-{identify(())}"
    return Launch(job, rank, size, rank, size, None, None, None, None, "none")


def _checked(launch: Launch) -> Launch:
    problem = ""
    if launch.size < 1:
        problem, path = f"size is {launch.size}; it must be at least 1", "size"
    elif launch.size > MAX_RANKS:
        problem, path = f"size is {launch.size}; a group has {MAX_RANKS} ranks at most", "size"
    elif not 0 <= launch.rank < launch.size:
        problem, path = f"rank is {launch.rank}; with size {launch.size} it is 0 to {launch.size - 1}", "rank"
    elif not 1 <= launch.local_size <= launch.size:
        problem = f"local_size is {launch.local_size}; with size {launch.size} it is 1 to {launch.size}"
        path = "local_size"
    elif not 0 <= launch.local_rank < launch.local_size:
        last = launch.local_size - 1
        problem = f"local_rank is {launch.local_rank}; with local_size {launch.local_size} it is 0 to {last}"
        path = "local_rank"
    elif not 1 <= len(launch.job.encode(errors="surrogatepass")) <= MAX_NAME:
        problem, path = f"the job id {launch.job[:64]!r} must have 1 to {MAX_NAME} bytes", "job"
    elif not _is_text(launch.job):
        problem, path = f"the job id {launch.job[:64]!r} is no UTF-8", "job"
    else:
        return launch
    raise ConfigError(problem, path=path, hint=f"launcher: {launch.launcher}")


def _is_text(name: str) -> bool:
    """Return whether all bytes of a variable were text: those that are not become lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# Small parsers


def parse_tasks_per_node(text: str, *, path: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Return Slurm's ``2(x3),1`` as ``(2, 2, 2, 1)``.

    :raises ConfigError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        number, paren, repeat = part.strip().partition("(x")
        repeat = repeat.removesuffix(")") if paren else "1"
        if not (number.isdigit() and repeat.isdigit() and len(number) < 7 and len(repeat) < 7):
            raise ConfigError(f"{path} is {text!r}; it looks like '2(x3),1'", path=path)
        counts += [int(number)] * int(repeat)
    return tuple(counts)


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's ``node[07-09,12],other``: ``node07``."""
    head, bracket, rest = hosts.partition("[")
    comma = head.find(",")
    if not bracket or comma >= 0:
        return head if comma < 0 else head[:comma]
    inside, _, tail = rest.partition("]")
    suffix = tail.split(",", 1)[0]
    first = inside.split(",", 1)[0].split("-", 1)[0]
    return first_host(f"{head}{first}{suffix}") if "[" in suffix else f"{head}{first}{suffix}"


def slurm_port(job: str, step: str) -> int:
    """Return the port before the one where the agents of a Slurm step meet (20000 to 29998)."""
    digits = "".join(char for char in f"{job}{step}" if char.isdigit())[-9:] or "0"
    return 20000 + 2 * (int(digits) * 7919 % 5000)


def _integer(environ: Environment, name: str, *, default: int | None = None, least: int = 0) -> int:
    text = environ.get(name)
    if text is None or text == "":
        if default is not None:
            return default
        raise ConfigError(f"{name} is not set, but other variables of the same launcher are", path=name)
    stripped = text.strip()
    if not stripped.isascii() or not stripped.removeprefix("-").isdigit() or len(stripped) > 10:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number", path=name)
    value = int(stripped)
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}", path=name)
    return value


def _optional(environ: Environment, name: str, *, least: int = 0) -> int | None:
    return _integer(environ, name, least=least) if environ.get(name) else None
