"""The units of configs/systemd under a real systemd, as docs/operations.md installs them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.systemd.machine import BOUND, Machine, Refused, machine
from tests.systemd.root import REPOSITORY, Root, debian_13, this_machine

UNITS = REPOSITORY / "configs" / "systemd"
RANK = REPOSITORY / "tests" / "support" / "steady_rank.py"
UNIT = "allreduced.service"
SOCKET = "allreduced.socket"
NOTIFY_RELOAD = 253
"""The version of systemd that has Type=notify-reload."""
CONFIG = 'version = 1\n[agent]\nlog_level = "info"\n'

pytestmark = pytest.mark.timeout(900)  # the first on Debian 13 makes it


def own_version() -> int:
    """Return the version of this machine's systemd; 0 if it has none."""
    if shutil.which("systemctl") is None:
        return 0
    return version_in(subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True).stdout)


def version_in(told: str) -> int:
    return int(told.split()[1].split(".")[0])


@pytest.fixture(scope="module", params=[this_machine, debian_13], ids=["here", "debian-13"])
def booted(request: pytest.FixtureRequest) -> Iterator[Machine]:
    root_of: Callable[[Path], Root] = request.param
    if root_of is debian_13 and own_version() >= NOTIFY_RELOAD:
        pytest.skip(f"this machine's own systemd, {own_version()}, has all that a newer one is needed for")
    with contextlib.ExitStack() as stack:
        try:
            box = stack.enter_context(machine(root_of))
        except Refused as refused:
            pytest.skip(f"no machine with systemd can be made here: {refused}")
        box.run("systemd-sysusers")
        box.run("systemctl", "daemon-reload")
        shutil.copy(RANK, box.shared)
        yield box


@pytest.fixture
def box(booted: Machine) -> Iterator[Machine]:
    """Return a machine whose agent is stopped and has a plain configuration."""
    configure(booted, CONFIG)
    yield booted
    booted.run("systemctl", "stop", SOCKET, UNIT)
    booted.run("rm", "-rf", "/etc/systemd/system/allreduced.service.d")
    booted.run("systemctl", "daemon-reload")
    booted.run("systemctl", "reset-failed", UNIT, check=False)
    booted.run("journalctl", "--rotate")
    booted.run("journalctl", "--vacuum-time=1us")


def configure(box: Machine, text: str) -> None:
    (box.shared / "agent.toml").write_text(text)
    box.run("install", "-m640", "-g", "allreduced", "/opt/shared/agent.toml", "/etc/allreduced/agent.toml")


def drop_in(box: Machine, text: str) -> None:
    (box.shared / "drop-in.conf").write_text(text)
    box.run("install", "-Dm644", "/opt/shared/drop-in.conf", "/etc/systemd/system/allreduced.service.d/test.conf")
    box.run("systemctl", "daemon-reload")


@contextlib.contextmanager
def ranks(box: Machine, operations: int, user: str = "allreduced") -> Iterator[list[subprocess.Popen[str]]]:
    """Run two ranks."""
    started = [
        box.python(box.shared / RANK.name, *map(str, (rank, 2, rank, 2, operations)), user=user) for rank in range(2)
    ]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.communicate(timeout=BOUND)


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def went_on(rank: subprocess.Popen[str]) -> None:
    """Wait until a rank has lost its agent, and works again in the same process."""
    assert (told := line(rank)).startswith("lost "), told
    while (told := line(rank)).startswith("lost "):
        continue
    assert told == "3 3"
    assert rank.poll() is None


def test_the_unit_is_sound_and_shut_in() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    analyzed = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", str(UNITS / UNIT)],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert analyzed.returncode == 0, analyzed.stdout + analyzed.stderr
    unit = (UNITS / UNIT).read_text()
    for needed in ("PrivateUsers=", "ProtectProc=", "PrivateDevices="):  # would break SO_PEERCRED, /proc/PID, RDMA
        assert f"\n{needed}" not in unit
    assert "\nLimitMEMLOCK=infinity\n" in unit


def test_a_job_of_two_ranks_runs_as_soon_as_the_unit_is_active(box: Machine) -> None:
    box.run("systemctl", "start", UNIT)  # returns when the agent says that it is ready
    assert box.show(UNIT, "StatusText") == "serving; clients: 0; operations in flight: 0; agents connected: 0"
    with ranks(box, 3) as (first, second):
        assert [line(rank) for rank in (first, second)] == ["3 3", "3 3"]
        assert (first.wait(BOUND), second.wait(BOUND)) == (0, 0)
    log = box.journal(UNIT)
    assert "event=ready socket=/run/allreduced/agent.sock" in log
    assert box.show(UNIT, "User") == "allreduced"
    assert box.run("stat", "-c", "%U:%G %a", "/run/allreduced").strip() == "allreduced:allreduced 755"
    assert box.show(UNIT, "LimitMEMLOCK") == "infinity"  # whether it can be had depends on what this machine allows


def test_other_users_may_attach_where_the_settings_say_so(box: Machine) -> None:
    configure(box, f'{CONFIG}[access]\nusers = ["*"]\n')
    box.run("systemctl", "start", UNIT)
    with ranks(box, 1, user="nobody") as (first, second):
        assert [line(rank) for rank in (first, second)] == ["3 3", "3 3"]


def test_a_reload_lets_other_users_in(box: Machine) -> None:
    box.run("systemctl", "start", UNIT)
    assert box.run("stat", "-c", "%a", "/run/allreduced/agent.sock").strip() == "600"
    configure(box, f'{CONFIG}[access]\nusers = ["*"]\n')
    box.run("systemctl", "reload", UNIT)
    while box.run("stat", "-c", "%a", "/run/allreduced/agent.sock").strip() != "666":
        assert box.show(UNIT, "ActiveState") in ("active", "reloading")
    with ranks(box, 1, user="nobody") as (first, second):
        assert [line(rank) for rank in (first, second)] == ["3 3", "3 3"]


def test_a_group_may_have_the_socket(box: Machine) -> None:
    drop_in(box, "[Service]\nSupplementaryGroups=nogroup\n")
    configure(box, f'{CONFIG}[access]\nsocket_group = "nogroup"\ngroups = ["nogroup"]\n')
    box.run("systemctl", "start", UNIT)
    assert box.run("stat", "-c", "%U:%G %a", "/run/allreduced/agent.sock").strip() == "allreduced:nogroup 660"
    with ranks(box, 1, user="nobody") as (first, second):
        assert [line(rank) for rank in (first, second)] == ["3 3", "3 3"]


def test_it_is_active_only_when_the_first_round_to_the_peers_is_over(box: Machine) -> None:
    # A peer that takes connections and says nothing keeps the round open until it is given up, or the round is.
    (box.shared / "silent.py").write_text(
        "import socket, time\ns = socket.create_server(('127.0.0.1', 4999))\n"
        "print('listens', flush=True)\ntime.sleep(900)\n"
    )
    silent = box.python(box.shared / "silent.py")
    try:
        assert line(silent) == "listens"
        configure(
            box,
            f'{CONFIG}[peers]\nlisten = "tcp://127.0.0.1:0"\n'
            '[[peers.static]]\nnode = "b"\naddress = "tcp://127.0.0.1:4999"\n',
        )
        box.run("systemctl", "start", "--no-block", UNIT)
        box.until(UNIT, "ActiveState", "activating")
        box.until(UNIT, "ActiveState", "active")
        log = box.journal(UNIT)
        assert log.index("event=not_") < log.index("event=ready")
        assert box.show(UNIT, "StatusText").endswith("agents connected: 0, not reached: b")
    finally:
        silent.kill()
        silent.communicate(timeout=BOUND)


def test_an_agent_that_cannot_start_says_why_in_its_status(box: Machine) -> None:
    drop_in(box, "[Service]\nRestart=no\n")
    configure(box, f"{CONFIG}[limits]\nclients = 0\n")
    assert box.status("systemctl", "start", UNIT) != 0
    assert box.show(UNIT, "ActiveState") == "failed"
    assert "agent.toml: $.limits.clients is 0" in box.journal(UNIT)
    configure(box, f'{CONFIG}[peers]\nlisten = "tcp://192.0.2.1:4123"\n[security]\ninsecure = true\n')
    assert box.status("systemctl", "start", UNIT) != 0
    assert "not started: cannot listen at tcp://192.0.2.1:4123" in box.show(UNIT, "StatusText")


def test_reload_with_a_good_and_with_a_broken_file(box: Machine) -> None:
    box.run("systemctl", "start", UNIT)
    pid = box.show(UNIT, "MainPID")
    configure(box, "version = 1\n[limits]\nclients = 7\n[engine]\nthreads = 1\n")
    box.run("systemctl", "reload", UNIT)
    box.until(UNIT, "StatusText", "restart needed for engine.threads; serving")
    log = box.journal(UNIT)
    assert "event=setting_changed setting=limits.clients old='1024' new='7'" in log
    assert "event=setting_changed setting=agent.log_level old='info' new='warning'" in log
    assert "event=restart_needed setting=engine.threads in_force='0' new='1'" in log

    configure(box, 'version = 1\n[access]\nusers = ["nobody-of-this-name"]\n')
    assert box.status("systemctl", "reload", UNIT) != 0
    box.until(UNIT, "StatusText", "reload failed, the settings from before are in force")
    configure(box, "version = 1\n[limits]\nclients = none\n")
    assert box.status("systemctl", "reload", UNIT) != 0
    box.until(UNIT, "StatusText", "reload failed, the settings from before are in force")
    assert "event=reload_failed in_force=old" in box.journal(UNIT)
    assert box.until(UNIT, "ActiveState", "active") == "active"

    with ranks(box, 1) as (first, second):
        assert [line(rank) for rank in (first, second)] == ["3 3", "3 3"]
    configure(box, CONFIG)
    box.run("systemctl", "reload", UNIT)
    box.until(UNIT, "StatusText", "serving; clients")
    assert box.show(UNIT, "MainPID") == pid
    assert box.show(UNIT, "NRestarts") == "0"


def test_the_watchdog_restarts_an_agent_that_is_stopped_and_its_clients_go_on(box: Machine) -> None:
    drop_in(box, "[Service]\nWatchdogSec=5s\nTimeoutAbortSec=1s\nRestartSec=100ms\n")
    box.run("systemctl", "start", UNIT)
    pid = box.show(UNIT, "MainPID")
    with ranks(box, 1 << 30) as started:
        assert [line(rank) for rank in started] == ["3 3", "3 3"]
        box.run("systemctl", "kill", "--kill-who=main", "-s", "STOP", UNIT)
        box.until(UNIT, "NRestarts", "1")
        box.until(UNIT, "ActiveState", "active")
        assert box.show(UNIT, "MainPID") != pid
        for rank in started:
            went_on(rank)
    assert "Watchdog timeout" in box.journal(UNIT)


def test_a_restart_keeps_the_clients(box: Machine) -> None:
    box.run("systemctl", "start", UNIT)
    with ranks(box, 1 << 30) as started:
        assert [line(rank) for rank in started] == ["3 3", "3 3"]
        box.run("systemctl", "restart", UNIT)
        for rank in started:
            went_on(rank)
    assert box.show(UNIT, "NRestarts") == "0"


def test_stop_waits_for_operations_and_ends_with_success(box: Machine) -> None:
    configure(box, f"{CONFIG}[failure]\nfailure_timeout = 0.5\n")
    box.run("systemctl", "start", UNIT)
    with ranks(box, 1 << 30) as started:
        assert [line(rank) for rank in started] == ["3 3", "3 3"]
        box.run("systemctl", "stop", UNIT)
        assert all(line(rank).startswith("lost ") for rank in started)
    assert box.show(UNIT, "Result") == "success"
    assert box.show(UNIT, "ExecMainStatus") == "0"
    assert "event=stopping clients=2" in box.journal(UNIT)
    assert box.status("test", "-e", "/run/allreduced/agent.sock") != 0


def test_the_socket_unit_starts_the_agent_for_the_first_client(box: Machine) -> None:
    box.run("systemctl", "start", SOCKET)
    assert box.show(UNIT, "ActiveState") == "inactive"
    with ranks(box, 1 << 30) as started:
        assert [line(rank) for rank in started] == ["3 3", "3 3"]
        assert box.show(UNIT, "ActiveState") == "active"
        # Nobody is refused meanwhile: the socket stays.
        box.run("systemctl", "restart", UNIT)
        for rank in started:
            went_on(rank)
    box.run("systemctl", "stop", SOCKET, UNIT)
    assert box.show(UNIT, "ExecMainStatus") == "0"
    assert box.status("test", "-e", "/run/allreduced/agent.sock") != 0


def test_where_systemd_knows_notify_reload_it_sends_the_signal_itself(box: Machine) -> None:
    version = version_in(box.run("systemctl", "--version"))
    if version < NOTIFY_RELOAD:
        pytest.skip(f"systemd {version} has no Type=notify-reload, {NOTIFY_RELOAD} has")
    drop_in(box, (UNITS / "notify-reload.conf").read_text())
    box.run("systemctl", "start", UNIT)
    configure(box, f"{CONFIG}[engine]\nthreads = 1\n")
    box.run("systemctl", "reload", UNIT)
    box.until(UNIT, "StatusText", "restart needed for engine.threads; serving")
    assert box.journal(UNIT).count("event=reloaded") == 1
    configure(box, "version = 1\n[limits]\nclients = none\n")
    assert box.status("systemctl", "reload", UNIT) != 0
    box.until(UNIT, "StatusText", "reload failed")
    assert box.show(UNIT, "ActiveState") == "active"


def test_the_journal_has_the_fields_of_each_line(box: Machine) -> None:
    box.run("systemctl", "start", UNIT)
    with ranks(box, 3) as (first, second):
        assert (first.wait(BOUND), second.wait(BOUND)) == (0, 0)
    pid = box.show(UNIT, "MainPID")
    box.run("systemctl", "stop", UNIT)

    (started,) = entries(box, "ALLREDUCED_EVENT=group_started")
    uid = box.run("id", "-u", "allreduced").strip()
    assert started["MESSAGE"] == (
        f"event=group_started uid={uid} job=job group=world generation=1 ranks=2 nodes=1 local=2"
    )
    expected = {
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "allreduced",
        "LOGGER": "allreduced.groups",
        "CODE_FUNC": "_started",
        "ALLREDUCED_UID": uid,
        "ALLREDUCED_JOB": "job",
        "ALLREDUCED_GROUP": "world",
        "ALLREDUCED_GENERATION": "1",
        "_SYSTEMD_UNIT": UNIT,
        "_PID": pid,
        "_TRANSPORT": "journal",
    }
    assert {name: started[name] for name in expected} == expected
    assert started["ALLREDUCED_NODE"] == box.run("hostname").strip()

    # An operation that fails: two ranks that disagree about it.
    box.run("systemctl", "start", UNIT)
    (box.shared / "mismatch.py").write_text(MISMATCH)
    disagreeing = [box.python(box.shared / "mismatch.py", str(rank)) for rank in range(2)]
    assert [rank.communicate(timeout=BOUND)[0] for rank in disagreeing] == ["MismatchError\n"] * 2
    (failed,) = entries(box, "ALLREDUCED_EVENT=operation_failed", "ALLREDUCED_JOB=strange job")
    expected = {
        "PRIORITY": "6",
        "ALLREDUCED_GROUP": "world",
        "ALLREDUCED_NAME": "layer 1",
        "ALLREDUCED_CODE": "mismatch",
    }
    assert {name: failed[name] for name in expected} == expected
    # What people search by, as docs/monitoring.md says.
    assert entries(box, "ALLREDUCED_JOB=strange job", "-p", "warning") == []
    assert [line["ALLREDUCED_EVENT"] for line in entries(box, "ALLREDUCED_JOB=job")] == ["group_started", "group_ended"]


def test_the_journal_has_fields_beside_json_too(box: Machine) -> None:
    configure(box, CONFIG.replace("[agent]\n", '[agent]\nlog_format = "json"\n'))
    box.run("systemctl", "start", UNIT)
    (started,) = entries(box, "ALLREDUCED_EVENT=ready")
    line = json.loads(started["MESSAGE"])
    assert (line["event"], line["level"], line["node"]) == ("ready", "info", started["ALLREDUCED_NODE"])
    assert (started["PRIORITY"], started["_TRANSPORT"]) == ("6", "journal")


MISMATCH = """
import sys
import numpy as np
from allreduced.client import connect
from allreduced.core.errors import MismatchError
rank = int(sys.argv[1])
comm = connect(job="strange job", rank=rank, size=2, local_rank=rank, local_size=2, agent="require", deadline=60.0)
try:
    comm.all_reduce(np.ones(3 + rank), name="layer 1", deadline=60.0)
except MismatchError as error:
    print(type(error).__name__)
comm.close()
"""


def entries(box: Machine, *wanted: str) -> list[dict[str, str]]:
    """Return what the journal has of the unit's lines with these fields."""
    box.run("journalctl", "--sync")
    found = box.run("journalctl", "--no-pager", "--quiet", "-o", "json", "-u", UNIT, *wanted)
    return [json.loads(entry) for entry in found.splitlines()]
