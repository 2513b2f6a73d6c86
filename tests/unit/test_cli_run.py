"""The launcher with a stand-in for the agent: output, statuses, signals, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from allreduced.cli.front import run_job
from allreduced.cli.job import Job
from allreduced.cli.processes import await_end, descendants
from allreduced.cli.supervisor import STARTING_PER_CORE
from allreduced.core.errors import ConfigError

AGENT = """
import argparse, json, os, pathlib, signal, socket, sys, time
parser = argparse.ArgumentParser()
for option in ("--socket", "--node", "--listen", "--ready-fd", "--join"):
    parser.add_argument(option)
parser.add_argument("--refuse", action="store_true")
parser.add_argument("--mute", action="store_true")
parser.add_argument("--hold")
parser.add_argument("--gate", type=pathlib.Path)
arguments = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if arguments.mute:
    sys.exit(3)
if arguments.gate:
    (arguments.gate / arguments.node).touch()
    while not (arguments.gate / f"{arguments.node}-open").exists():
        time.sleep(0.01)
if arguments.hold:
    door = socket.socket(socket.AF_UNIX)
    door.bind("\\0" + arguments.hold)
    door.listen()
said = {"ready": True, "socket": arguments.socket, "listen": "tcp://127.0.0.1:1"}
if arguments.refuse:
    said = {"error": ["config", "bad setting", "mend it", {}]}
os.write(int(arguments.ready_fd), json.dumps(said).encode() + b"\\n")
os.close(int(arguments.ready_fd))
while not arguments.refuse:
    signal.pause()
sys.exit(2)
"""

FRONT = """
import json, resource, sys
from allreduced.cli.front import run_job
from allreduced.cli.job import Job
fields = json.loads(sys.argv[1])
if limit := fields.pop("limit", 0):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
on_line = (lambda line: sys.stdout.write(f"heard {line.decode()}\\n")) if fields.pop("listen", False) else None
sys.exit(run_job(Job.from_json(json.dumps(fields).encode()), on_line))
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the front of a job as a process of its own, as the shell does."""
    agent, front = tmp_path / "agent.py", tmp_path / "front.py"
    agent.write_text(AGENT)
    front.write_text(FRONT)
    with ExitStack() as stack:

        def start(*command: str, **fields: object) -> subprocess.Popen[bytes]:
            job = {"command": command, "agent_program": [sys.executable, str(agent)], **fields}
            process = subprocess.Popen(
                [sys.executable, str(front), json.dumps(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def await_lines(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


@contextmanager
def all_end(root: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """Watch all processes below ``root`` and check that every one of them ends after the block."""
    descriptors: dict[int, int] = {}
    for process in descendants(root.pid):
        with suppress(ProcessLookupError):  # it has ended since it was listed
            descriptors[os.pidfd_open(process.pid)] = process.pid
    try:
        yield set(descriptors.values())
        poll = select.poll()
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        alive, deadline = dict(descriptors), time.monotonic() + 30
        while alive and time.monotonic() < deadline:
            for fd, _ in poll.poll(1000):
                poll.unregister(fd)
                del alive[fd]
        assert not alive, f"still running: {sorted(alive.values())}"
    finally:
        for fd in descriptors:
            os.close(fd)


def test_output_is_prefixed_by_rank_and_the_status_is_0(start: Start) -> None:
    status, out, err = ended(start("sh", "-c", "echo out $RANK; echo err $RANK >&2", nodes=2, ranks_per_node=2))
    assert status == 0
    assert sorted(out.splitlines()) == [b"[%d] out %d" % (rank, rank) for rank in range(4)]
    assert sorted(err.splitlines()) == [b"[%d] err %d" % (rank, rank) for rank in range(4)]


def test_without_prefix_bytes_pass_as_they_are(start: Start) -> None:
    data = bytes(range(256)) * 700
    code = "import os\ndata = bytes(range(256)) * 700\nwhile data:\n    data = data[os.write(1, data):]"
    assert ended(start(*python(code), prefix=False)) == (0, data, b"")


def test_lines_of_many_ranks_stay_whole(start: Start) -> None:
    code = (
        "import os\nrank = os.environ['RANK']\n"
        "for number in range(300):\n    os.write(1, b'a' * 100)\n    os.write(1, f' {rank} {number}\\n'.encode())"
    )
    status, out, _ = ended(start(*python(code), ranks_per_node=3))
    assert status == 0
    assert sorted(out.splitlines()) == sorted(
        b"[%d] %s %d %d" % (rank, b"a" * 100, rank, number) for rank in range(3) for number in range(300)
    )


def test_the_first_failure_stops_the_others_and_gives_the_status(start: Start) -> None:
    status, _, err = ended(start("sh", "-c", "test $RANK = 2 && exit 7; sleep 1000", nodes=2, ranks_per_node=2))
    assert status == 7
    assert err == b"allreduced: error: rank 2 (node1) exited with status 7; the other ranks were stopped\n"


def test_death_by_a_signal_is_128_and_the_signal(start: Start) -> None:
    status, _, err = ended(start("sh", "-c", "kill -SEGV $$"))
    assert status == 128 + signal.SIGSEGV
    assert err == b"allreduced: error: rank 0 (node0) was killed by SIGSEGV\n"


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(start: Start) -> None:
    process = start("sh", "-c", "trap '' TERM; test $RANK = 1 && exit 5; sleep 1000", ranks_per_node=2, grace=0.05)
    assert ended(process)[0] == 5


def test_a_command_that_is_not_found_starts_nothing(start: Start) -> None:
    assert ended(start("no-such-command")) == (127, b"", b"allreduced: error: command not found: no-such-command\n")


def test_a_file_that_is_not_executable_gets_a_hint(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    status, _, err = ended(start(str(script)))
    assert status == 126
    assert f"hint: try: python {script}" in err.decode()


def test_a_file_with_a_path_is_not_told_to_have_one(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.touch()
    assert ended(start(str(file)))[2].decode().endswith(f"  hint: try: chmod +x {file}\n")


def test_more_ranks_than_a_group_has_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"3 nodes with 30000 ranks each are 90000 ranks; a group has 65536"
    ) as caught:
        run_job(Job(("true",), nodes=3, ranks_per_node=30_000))
    assert caught.value.hint == "lower --nodes or --ranks-per-node"


def test_a_grace_of_any_length_is_waited_for(start: Start) -> None:
    assert ended(start(*python("import sys; sys.exit(3)"), grace=1e300, ranks_per_node=2))[0] == 3


@pytest.mark.parametrize("shape", [{"nodes": 40}, {"ranks_per_node": 40}])
def test_a_job_for_which_there_are_no_descriptors_says_what_to_raise(start: Start, shape: dict[str, int]) -> None:
    status, out, err = ended(start("sleep", "60", limit=48, **shape))
    assert status != 0
    assert out == b""
    assert re.fullmatch(
        rb"allreduced: error: cannot start (agent node\d+|'sleep'): Too many open files\n"
        rb"  hint: raise the limit on open files \(ulimit -n\)\n",
        err,
    )


def test_an_agent_that_refuses_ends_the_job_with_its_reason(start: Start) -> None:
    status, out, err = ended(start("echo", "never", nodes=2, agent_arguments=["--refuse"]))
    assert (status, out) == (1, b"")
    assert err == b"allreduced: error: agent node0: bad setting\n  hint: mend it\n"


def test_an_agent_that_dies_before_it_is_ready_ends_the_job(start: Start) -> None:
    status, out, err = ended(start("echo", "never", agent_arguments=["--mute"]))
    assert (status, out) == (3, b"")
    assert err == b"allreduced: error: agent node0 exited with status 3; the job was stopped\n"


def test_many_agents_start_a_few_at_a_time(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    at_once = STARTING_PER_CORE * len(os.sched_getaffinity(0))
    nodes = at_once + 3
    process = start("true", nodes=nodes, agent_arguments=["--gate", str(gate)])
    ready = set[str]()
    while len(ready) < nodes:
        starting = {path.name for path in gate.iterdir() if not path.name.endswith("-open")} - ready
        most = min(at_once, nodes - len(ready)) if ready else 1
        assert len(starting) <= most
        if len(starting) == most:
            ready.add(first := min(starting))
            (gate / f"{first}-open").touch()
    assert ended(process) == (0, b"", b"")


def test_an_agent_that_is_killed_ends_the_job(start: Start) -> None:
    process = start("sh", "-c", "echo up; exec sleep 1000", nodes=2)
    await_lines(process, 2)
    agent = next(
        found.pid
        for found in descendants(process.pid)
        if b"--node\0node1" in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    )
    os.kill(agent, signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 137
    assert err == b"allreduced: error: agent node1 was killed by SIGKILL; the job was stopped\n"


HANG_UP = """
import os, socket
s = socket.socket(socket.AF_UNIX)
s.connect({!r})
print("up", flush=True)
try:
    s.recv(1)
finally:
    os._exit(1)
"""
"""A rank that fails as soon as its agent has closed its connection."""


def test_an_agent_that_is_killed_is_blamed_and_no_rank_that_fails_of_it_at_once(start: Start) -> None:
    held = f"\0allreduced-test-{secrets.token_hex(8)}"
    code = HANG_UP.format(held)
    process = start(sys.executable, "-S", "-c", code, ranks_per_node=4, agent_arguments=["--hold", held[1:]])
    await_lines(process, 4)
    (agent,) = (
        found.pid
        for found in descendants(process.pid)
        if b"--node\0node0" in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    )
    os.kill(agent, signal.SIGKILL)
    status, _, err = ended(process)
    assert (status, err) == (137, b"allreduced: error: agent node0 was killed by SIGKILL; the job was stopped\n")


def test_whoever_is_ending_can_be_collected_and_nobody_else_is_waited_for() -> None:
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ending,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living,
    ):
        ending.kill()
        assert ending.stdout is not None
        assert ending.stdout.read() == b""  # the kernel has closed what it had open
        await_end([ending.pid, living.pid], 60.0)
        assert os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        assert os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        living.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_to_all_ranks(start: Start, number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{number:d}])\n"
        "print('up', flush=True)\n"
        f"print('got', int(signal.sigwait([{number:d}])), flush=True)"
    )
    process = start(*python(code), ranks_per_node=2)
    await_lines(process, 2)
    process.send_signal(number)
    status, out, err = ended(process)
    assert (status, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[0] got %d" % number, b"[1] got %d" % number]


def test_a_job_that_ends_of_a_signal_says_so(start: Start) -> None:
    process = start("sh", "-c", "echo up; exec sleep 1000", ranks_per_node=2)
    await_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, b"", b"allreduced: error: stopped by SIGTERM\n")


def test_a_second_sigint_kills(start: Start) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('not yet', flush=True))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    process = start(*python(code))
    await_lines(process, 1)
    process.send_signal(signal.SIGINT)
    assert await_lines(process, 1) == [b"[0] not yet\n"]
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


FAMILY = "(setsid sleep 1000 & echo $!); sleep 1000 & echo $!; echo $$; wait"
"""A rank with a child, and a grandchild that left its session and its parents."""


@pytest.mark.parametrize("victim", ["front", "supervisor"])
def test_nothing_is_left_when_front_or_supervisor_is_killed(start: Start, victim: str) -> None:
    process = start("sh", "-c", FAMILY, nodes=2, ranks_per_node=2)
    told = {int(line.split()[1]) for line in await_lines(process, 12)}
    with all_end(process) as pids:
        assert told <= pids
        assert len(pids) == 1 + 2 + 12  # supervisor, agents, families
        supervisor = min(found.pid for found in descendants(process.pid) if found.parent == process.pid)
        os.kill(process.pid if victim == "front" else supervisor, signal.SIGKILL)
        status, _, err = ended(process)
    assert status == (-9 if victim == "front" else 137)
    if victim == "supervisor":
        assert b"the supervisor of the job was killed by SIGKILL" in err


def test_nothing_is_left_when_the_front_is_killed_while_nobody_reads(start: Start) -> None:
    process = start("sh", "-c", "echo up; exec yes", ranks_per_node=2)
    await_lines(process, 1)
    with all_end(process):
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)


def test_what_ranks_leave_in_the_background_ends_with_the_job(start: Start) -> None:
    process = start("sh", "-c", "trap 'exit 0' TERM; (setsid sleep 1000 & echo $!); sleep 1000 & wait")
    grandchild = int(await_lines(process, 1)[0].split()[1])
    with all_end(process) as pids:
        assert grandchild in pids
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, b"", b"")


def test_a_job_that_is_stopped_ends_though_nobody_reads(start: Start) -> None:
    process = start("sh", "-c", "echo up; exec yes", ranks_per_node=2, grace=0.2)
    await_lines(process, 1)
    with all_end(process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_job_that_is_stopped_waits_for_a_reader_for_a_grace_of_any_length(start: Start) -> None:
    code = (
        "import signal, sys\ndef end(*_):\n    print('x' * 300_000)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nsignal.pause()"
    )
    process = start(*python(code), grace=1e300)
    await_lines(process, 1)
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert (status, out, err) == (0, b"[0] " + b"x" * 300_000 + b"\n", b"")


def test_a_job_that_is_stopped_waits_for_a_reader_that_reads(start: Start) -> None:
    code = (
        "import signal, sys\ndef end(*_):\n    print('x' * 300_000)\n    sys.exit('end')\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nsignal.pause()"
    )
    process = start(*python(code), grace=60)
    await_lines(process, 1)
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert (status, out) == (128 + signal.SIGTERM, b"[0] " + b"x" * 300_000 + b"\n")
    assert err.startswith(b"[0] end\n")


def test_output_that_nobody_reads_any_more_ends_the_job(start: Start) -> None:
    process = start("yes")
    await_lines(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141


def test_lines_of_the_channel_reach_the_front(start: Start) -> None:
    code = "import os\nos.write(int(os.environ['ALLREDUCED_CHANNEL']), b'one\\ntwo\\n')"
    assert ended(start(*python(code), listen=True)) == (0, b"heard one\nheard two\n", b"")


def test_where_the_end_of_processes_cannot_be_waited_for_nobody_fails_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    child = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is ending, and stays
        monkeypatch.setattr(os, "pidfd_open", refuse)
        await_end([child.pid], 60.0)
    finally:
        assert child.wait(60) == 0
