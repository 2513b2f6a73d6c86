"""Real agents that find each other by a name."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.agents import AgentProcess, StartAgent, complaints

from allreduced.client.inquiry import ask_status
from allreduced.core.addresses import parse_socket

SCRIPT = """
import sys
import numpy as np
from allreduced.client import connect
with connect(job="j", rank=int(sys.argv[1]), size=2, local_rank=0, local_size=1) as comm:
    print(comm.all_reduce(np.arange(3.0), op="sum").tolist())
"""


def reduces(*agents: AgentProcess) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank)],
            env={"ALLREDUCED_SOCKET": agent.socket, "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, agent in enumerate(agents)
    ]
    assert [rank.communicate(timeout=60.0)[0] for rank in ranks] == ["[0.0, 2.0, 4.0]\n"] * 2


def test_agents_behind_a_name_find_each_other_and_know_themselves(start_agent: StartAgent, free_port: int) -> None:
    names = {"ALLREDUCED_PEERS_DNS": f"localhost:{free_port}", "ALLREDUCED_PEERS_DNS_INTERVAL": "0.2"}
    first = start_agent("a", "--listen", f"tcp://127.0.0.1:{free_port}", **names)
    second = start_agent("b", "--listen", "tcp://127.0.0.1:0", **names)
    reduces(first, second)
    for agent in (first, second):
        assert complaints(agent.logged().replace("allreduced: the agent is ready", "")) == [], agent.node
        assert agent.stop() == 0


def test_a_name_that_is_not_known_is_told_and_shown_and_no_reason_not_to_start(start_agent: StartAgent) -> None:
    agent = start_agent("a", "--listen", "tcp://127.0.0.1:0", **{"ALLREDUCED_PEERS_DNS": "no-such-name.invalid:4123"})
    assert agent.says("event=name_unknown name=no-such-name.invalid:4123")
    told = ask_status(parse_socket(agent.socket), path=agent.socket, others=True, timeout=30.0)
    (unanswered,) = told.unanswered
    assert unanswered.node == ""
    assert "the name no-such-name.invalid:4123 is not known: " in unanswered.reason
    assert agent.stop() == 0
