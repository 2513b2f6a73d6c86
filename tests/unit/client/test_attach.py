from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from allreduced.client import (
    AgentUnavailable,
    AsyncCommunicator,
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    connect,
    private_agent,
)
from allreduced.client.conversation import Conversation
from allreduced.client.environment import AgentSettings, Launch, read_agent
from allreduced.client.private_agent import Lock, PrivateAgent
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import to_wire
from allreduced.protocol.local import Hello, Join, Refused, RequestFailed, ToAgent, Welcome, encode

if TYPE_CHECKING:
    from tests.unit.client.conftest import Client, FakeAgent, MakeAgent

TEST_AGENT = Path(__file__).with_name("conftest.py")

STARTER = """
import importlib.util, os, sys, threading
spec = importlib.util.spec_from_file_location("fake", {path!r})
fake = importlib.util.module_from_spec(spec)
sys.modules["fake"] = fake
spec.loader.exec_module(fake)
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
agent = fake.FakeAgent(name=arguments["--socket"])
os.write(int(arguments["--ready-fd"]), b'{{"ready": true, "socket": "x"}}\\n')
os.close(int(arguments["--ready-fd"]))
agent.until(lambda: agent.ended >= int(arguments["--ranks"]))
agent.close()
"""


@pytest.fixture(autouse=True)
def no_agent_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("ALLREDUCED_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("allreduced.client.environment.SYSTEM_SOCKET", str(tmp_path / "system.sock"))


@pytest.fixture
def job() -> str:
    return f"test-{secrets.token_hex(6)}"


def alone(**arguments: object) -> object:
    return connect(**{"rank": 0, "size": 1} | arguments)  # type: ignore[arg-type]  # mixed keywords


def test_a_named_socket_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match=r"there is no such file.*allreduced agent --socket"):
        alone(socket=str(tmp_path / "none.sock"))
    with pytest.raises(AgentUnavailable, match="nobody listens"):
        alone(socket=f"@allreduced-none-{secrets.token_hex(8)}")


def test_a_left_over_file_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(place))
    monkeypatch.setenv("ALLREDUCED_SOCKET", str(place))
    with pytest.raises(AgentUnavailable, match="left over"):
        alone()


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    place = tmp_path / "agent.sock"
    place.write_text("")
    with pytest.raises(ConfigError, match="is not a socket") as caught:
        alone(socket=str(place))
    assert caught.value.path == "socket"


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match="108"):
        alone(socket="/tmp/" + "x" * 120)


def test_a_socket_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        if os.geteuid() == 0:
            os.chown(place, 4321, 4321)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 4321)
        with pytest.raises(ConfigError, match="neither root nor uid"):
            alone(socket=str(place))


def test_an_agent_of_somebody_else(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduced.client.endpoint.struct.unpack", lambda *_: (1, 4321, 4321))
    with pytest.raises(ConfigError, match="runs as uid 4321"):
        alone(socket=agent.socket)


def test_an_agent_at_the_usual_place_is_used(tmp_path: Path, make_agent: MakeAgent) -> None:
    (tmp_path / "allreduced").mkdir()
    make_agent(name=str(tmp_path / "allreduced" / "agent.sock"))
    with connect(job="j", rank=0, size=1, agent="require") as comm:
        assert comm.all_reduce(np.ones(1))[0] == 1


def test_starting_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match=rf"starting one is turned off.*{tmp_path}.*system.sock"):
        alone(agent="require")
    monkeypatch.setenv("ALLREDUCED_AGENT", "require")
    with pytest.raises(AgentUnavailable, match="turned off"):
        alone()


def test_a_refusal_is_raised_with_its_facts(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        client.send(Refused(to_wire(AuthenticationError("who are you", hint="say it"))))
        return True

    with pytest.raises(AuthenticationError, match="who are you"):
        alone(socket=make_agent(script).socket)


def test_ranks_that_never_come_are_named(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Join):
            assert message.deadline <= 5.0
            client.send(RequestFailed(message.request, to_wire(DeadlineExceeded("rank 1 missing", missing=[1]))))
            return True
        return False

    with pytest.raises(DeadlineExceeded) as caught:
        connect(socket=make_agent(script).socket, job="j", rank=0, size=2, deadline=5.0)
    assert caught.value.missing == (1,)


def test_an_agent_that_hangs_does_not_hang_connect(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduced.client.attach.HELLO_SECONDS", 0.02)
    agent = make_agent(lambda agent, client, message: isinstance(message, Hello))
    with pytest.raises(AgentUnavailable, match="does not answer"):
        alone(socket=agent.socket)
    agent.until(lambda: agent.ended == 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"deadline": 0},
        {"deadline": "soon"},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"default_deadline": 0.0},
        {"default_deadline": -3},
        {"default_deadline": float("nan")},
        {"default_deadline": float("inf")},
        {"group": "x" * 300},
        {"group": 5},
        {"job": 3},
        {"shared_memory": "no"},
    ],
)
def test_bad_arguments(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        alone(**bad)


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"rank": "x"}, "rank"),
        ({"rank": 0.0}, "rank"),
        ({"size": True}, "size"),
        ({"size": 1 << 20}, "size"),
        ({"local_rank": "0"}, "local_rank"),
        ({"socket": 5}, "socket"),
        ({"socket": "\ud800"}, "socket"),
    ],
)
def test_bad_numbers_and_places(bad: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        alone(**bad)
    assert caught.value.path == path


# Private agents: what is started is a fake one, in a process of its own.


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, str], Path]:
    """Make private agents be a Python program; returns a file that has one line for each start."""

    def prepare(ranks: int, program: str) -> Path:
        log = tmp_path / "starts"
        script = tmp_path / "agent.py"
        script.write_text(f"with open({str(log)!r}, 'a') as log: log.write('x')\n{program}")

        def command(self: PrivateAgent, ready: int = 3) -> list[str]:
            arguments = ["--socket", str(self.socket), "--ready-fd", str(ready), "--ranks", str(ranks)]
            return [sys.executable, str(script), *arguments]

        monkeypatch.setattr(PrivateAgent, "command", command)
        return log

    return prepare


@pytest.fixture(autouse=True)
def reap() -> Iterator[None]:
    """Wait for the private agents that a test started: they are children of this process."""
    yield
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def test_one_rank_starts_the_private_agent_for_all(starts: Callable[[int, str], Path], job: str) -> None:
    log = starts(4, STARTER.format(path=str(TEST_AGENT)))
    sums: list[float] = []

    def run(rank: int) -> None:
        with connect(job=job, rank=rank, size=4) as comm:
            sums.append(float(comm.all_reduce(np.full(5000, float(rank)))[0]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [6.0] * 4
    assert log.read_text() == "x"


async def test_asyncio_starts_a_private_agent_too(starts: Callable[[int, str], Path], job: str) -> None:
    log = starts(1, STARTER.format(path=str(TEST_AGENT)))
    async with AsyncCommunicator.connect(job=job, rank=0, size=1) as comm:
        assert (await comm.all_reduce(np.ones(2)))[0] == 1
    assert log.read_text() == "x"


def test_a_private_agent_inherits_no_descriptors(starts: Callable[[int, str], Path], job: str) -> None:
    program = "import os\nprint(sorted(os.listdir('/proc/self/fd')), file=open(log.name + '.fds', 'w'))\n"
    log = starts(1, program + STARTER.format(path=str(TEST_AGENT)))
    reader, writer = os.pipe()
    try:
        os.set_inheritable(writer, True)
        with connect(job=job, rank=0, size=1) as comm:
            comm.barrier()
    finally:
        os.close(reader)
        os.close(writer)
    # 3 tells that it is ready, 4 is the directory that is listed.
    assert log.with_name("starts.fds").read_text().strip() == "['0', '1', '2', '3', '4']"


def test_a_descriptor_above_the_limit_does_not_keep_the_private_agent_from_starting(
    starts: Callable[[int, str], Path], job: str
) -> None:
    log = starts(1, STARTER.format(path=str(TEST_AGENT)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = os.dup2(0, 200, inheritable=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
    try:
        with connect(job=job, rank=0, size=1) as comm:
            comm.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(high)
    assert log.read_text() == "x"


def test_what_the_private_agent_says_is_raised(starts: Callable[[int, str], Path], job: str) -> None:
    error = list(to_wire(AuthenticationError("no secret", hint="set ALLREDUCED_SECRET or ALLREDUCED_INSECURE=1")))
    starts(1, f"import os\nos.write(3, {json.dumps({'error': error}).encode()!r} + b'\\n')\n")
    with pytest.raises(AuthenticationError, match=r"no secret.*ALLREDUCED_SECRET"):
        connect(job=job, rank=0, size=1)


ORPHAN = """
import os
ready, tell = os.pipe()
if os.fork():
    os.read(ready, 1)
    os.write(3, {error!r} + b'\\n')
    os._exit(1)
os.dup2(tell, 3)
"""
"""Another agent, which listens just before this one fails. Whoever looks whether it does counts as a rank."""


def test_an_agent_whose_starter_was_killed_is_used(starts: Callable[[int, str], Path], job: str) -> None:
    error = json.dumps({"error": list(to_wire(ConfigError("an agent listens there already")))}).encode()
    log = starts(2, ORPHAN.format(error=error) + STARTER.format(path=str(TEST_AGENT)))
    with connect(job=job, rank=0, size=1) as comm:
        assert comm.all_reduce(np.ones(2)).tolist() == [1.0, 1.0]
    assert log.read_text() == "x"


def test_a_private_agent_that_fails_is_tried_again_but_not_for_ever(
    starts: Callable[[int, str], Path], job: str
) -> None:
    log = starts(1, "raise SystemExit(3)")
    with pytest.raises(AgentUnavailable, match=r"did not start .status 3."):
        connect(job=job, rank=0, size=1)
    assert log.read_text() == "xxx"


def test_a_private_agent_that_never_gets_ready_is_stopped(starts: Callable[[int, str], Path], job: str) -> None:
    starts(1, "import time\ntime.sleep(1000)")
    with pytest.raises(AgentUnavailable, match="not ready in time"):
        connect(job=job, rank=0, size=1, deadline=0.3)


def test_a_stopping_agent_of_the_last_run_is_waited_for(
    starts: Callable[[int, str], Path], job: str, make_agent: MakeAgent
) -> None:
    launch = Launch(job, 0, 1, 0, 1, None, None, None, None, "none")
    name = str(private_agent.private_agent(launch, SETTINGS, uid=os.geteuid(), host="h").socket)
    log = starts(1, STARTER.format(path=str(TEST_AGENT)))

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        agent._drop(client)
        agent._stop()
        return True

    make_agent(script, name)
    with connect(job=job, rank=0, size=1) as comm:
        assert comm.all_reduce(np.ones(1))[0] == 1
    assert log.read_text() == "x"


def test_without_the_extra_the_hint_says_what_to_install(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AgentUnavailable, match=r"pip install 'allreduced\[agent\]'"):
        connect(job=job, rank=0, size=1)


SETTINGS = AgentSettings(None, "socket", (), False, None)


def test_names_of_private_agents() -> None:
    one = Launch("j", 0, 2, 0, 2, 0, 1, None, None, "torchrun")
    found = private_agent.private_agent(one, SETTINGS, uid=7, host="h")
    assert str(found.socket).startswith("@allreduced-7-")
    assert (found.node, found.join) == ("h", None)
    two = Launch("j", 0, 4, 0, 2, 1, 2, "m", 5, "torchrun", one_node=False)
    joined = AgentSettings(None, "socket", (), False, "m:6")
    found = private_agent.private_agent(two, joined, uid=7, host="h")
    assert str(found.socket).endswith("-1")
    assert (found.node, found.join) == ("h-1", "m:6")
    named = AgentSettings(None, "socket", (), False, "m:6", "of-the-certificate")
    assert private_agent.private_agent(two, named, uid=7, host="h").node == "of-the-certificate"
    assert read_agent({"ALLREDUCED_AGENT_NODE": "n"}, one, socket=None, agent=None).node == "n"
    command = found.command()
    assert command[:5] == [sys.executable, "-P", "-m", "allreduced.cli.main", "agent"]
    assert command[5:] == [
        "--private", "--socket", str(found.socket), "--ready-fd", "3", "--node", "h-1", "--join", "m:6",
    ]  # fmt: skip
    with pytest.raises(AgentUnavailable, match="ALLREDUCED_JOIN"):
        private_agent.private_agent(two, SETTINGS, uid=7, host="h")


def test_the_lock_is_free_again_when_its_holder_is_gone() -> None:
    name = SocketAddress(f"@allreduced-test-{secrets.token_hex(8)}")
    first, second = Lock(name), Lock(name)
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()


def test_the_agents_deadline_holds_where_the_group_names_none(agent: FakeAgent) -> None:
    with connect(socket=agent.socket, job="a", rank=0, size=1):
        pass
    with connect(socket=agent.socket, job="b", rank=0, size=1, default_deadline=7.0):
        pass
    assert [message.default_deadline for message in agent.seen if isinstance(message, Join)] == [0.0, 7.0]


def test_a_hung_agent_is_given_up_after_the_deadline_that_holds() -> None:
    conversation = Conversation()
    conversation.feed(encode(Welcome(1, "n", 1, 8192, 45.0)))
    conversation.join(job="j", group="g", rank=0, size=1, local_rank=0, deadline=1.0, default_deadline=0.0)
    assert conversation.default_deadline == 45.0
    conversation.join(job="j", group="g", rank=0, size=1, local_rank=0, deadline=1.0, default_deadline=7.0)
    assert conversation.default_deadline == 7.0
