"""The command `allreduced status`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.reports import REPORT, agent

from allreduced.cli import status
from allreduced.cli.agents_here import listening
from allreduced.cli.main import main
from allreduced.client.inquiry import ClusterStatus
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import AgentUnavailable, AuthenticationError
from allreduced.protocol.status import AgentReport, PeerReport

TABLE = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 100 @allreduced-run-1-node0
0000000000000000: 00000003 00000000 00000000 0001 03 101 @allreduced-run-1-node0
0000000000000000: 00000002 00000000 00000000 0001 01 102 @allreduced-0-abc-lock
0000000000000000: 00000002 00000000 00010000 0001 01 103 /run/other.sock
0000000000000000: 00000002 00000000 00010000 0001 01 104 @allreduced-0-abc
0000000000000000: 00000002 00000000 zz 0001 01 104 @allreduced-0-x
0000000000000000: 00000003 00000000 00000000 0001 03 105
"""


def test_agents_without_a_usual_place_are_found() -> None:
    assert listening(TABLE.splitlines()) == ["@allreduced-0-abc", "@allreduced-run-1-node0"]


class Agents:
    """Agents by socket, asked instead of real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reports: dict[str, AgentReport | Exception]) -> None:
        self.reports = reports
        self.asked: list[tuple[str, bool]] = []
        monkeypatch.setattr(status, "ask_status", self.ask)
        monkeypatch.setattr(status, "agents_here", lambda: sorted(name for name in reports if name.startswith("@")))
        for name in ("ALLREDUCED_SOCKET", "XDG_RUNTIME_DIR"):
            monkeypatch.delenv(name, raising=False)

    def ask(self, address: SocketAddress, *, path: str, others: bool, timeout: float) -> ClusterStatus:
        self.asked.append((str(address), others))
        told = self.reports.get(str(address), AgentUnavailable(f"no agent answers at {address}"))
        if isinstance(told, Exception):
            raise told
        return ClusterStatus((told,), ())


def test_the_named_agent_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    agents = Agents(monkeypatch, {"@x": REPORT, "@y": agent("y")})
    assert main(["status", "--socket", "@x"]) == 0
    assert "this one was asked" in capsys.readouterr().out
    monkeypatch.setenv("ALLREDUCED_SOCKET", "@y")
    assert main(["status", "--local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"] == "y"
    assert agents.asked == [("@x", True), ("@y", False)]


def test_the_usual_places_come_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    agents = Agents(monkeypatch, {"/run/allreduced/agent.sock": REPORT, "@allreduced-x": agent("x")})
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert main(["status"]) == 0
    assert [place for place, _ in agents.asked] == ["/run/user/7/allreduced/agent.sock", "/run/allreduced/agent.sock"]


def test_no_agent_is_status_1_and_says_where_was_looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Agents(monkeypatch, {"@allreduced-x": AuthenticationError("not yours")})
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert "no agent runs on this node: no agent answers at /run/allreduced/agent.sock" in said
    assert "--socket" in said


def test_private_agents_of_one_job_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replace(REPORT, incarnation=11, peers=(PeerReport("b", 12, "", 0.0),))
    agents = Agents(monkeypatch, {"@allreduced-1": first, "@allreduced-2": replace(agent("b"), incarnation=12)})
    assert main(["status"]) == 0
    assert agents.asked[-1] == ("@allreduced-1", True)


def test_private_agents_of_several_jobs_must_be_chosen_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Agents(monkeypatch, {"@allreduced-1": agent("a"), "@allreduced-2": agent("b")})
    assert main(["status"]) == 2
    assert "--socket @allreduced-1, or --socket @allreduced-2" in capsys.readouterr().err
