"""A Prometheus server of a test's own, and what its HTTP API says."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import yaml
from tests.monitoring.tools import Tools

BOUND = 60.0
"""Seconds in which what must come has come: many times of what it takes."""

REST = 0.1
"""Seconds between two questions."""

STOP_SECONDS = 30.0

Labels = frozenset[tuple[str, str]]
_T = TypeVar("_T")


def until(ask: Callable[[], _T], holds: Callable[[_T], bool]) -> _T:
    """Ask until the answer is as wanted, and return it."""
    give_up = time.monotonic() + BOUND
    while not holds(answer := ask()):
        assert time.monotonic() < give_up, f"after {BOUND} s the answer is still {answer!r}"
        time.sleep(REST)
    return answer


@dataclass(frozen=True)
class Server:
    """A server that is ready. ``address``: host and port."""

    address: str

    def get(self, path: str, **parameters: str) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        connection = http.client.HTTPConnection(self.address, timeout=BOUND)
        try:
            connection.request("GET", f"{path}?{urlencode(parameters)}")
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def query(self, expression: str) -> dict[Labels, float]:
        """Return the value of an expression now, by labels. It must be one that Prometheus can work out."""
        vector = self._data("/api/v1/query", query=expression)["result"]
        return {frozenset(sample["metric"].items()): float(sample["value"][1]) for sample in vector}

    def alerts(self, name: str) -> list[tuple[Labels, str]]:
        """Return labels, without its name, and state of all alerts of a rule that are pending or fire."""
        alerts = self._data("/api/v1/alerts")["alerts"]
        return [
            (frozenset(alert["labels"].items()) - {("alertname", name)}, alert["state"])
            for alert in alerts
            if alert["labels"]["alertname"] == name
        ]

    def _data(self, path: str, **parameters: str) -> Any:
        status, body = self.get(path, **parameters)
        answer = json.loads(body)
        assert (status, answer["status"], answer.get("warnings")) == (200, "success", None), (parameters, answer)
        return answer["data"]


@contextlib.contextmanager
def prometheus(tools: Tools, directory: Path, config: Mapping[str, object]) -> Iterator[Server]:
    """Yield a server with this configuration that is ready, on a port that the kernel chooses; end it afterwards.

    Its data and its log are in ``directory``.
    """
    file, log = directory / "prometheus.yml", directory / "prometheus.log"
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    command = [
        *(str(tools.prometheus), f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"),
        *("--web.listen-address=127.0.0.1:0", "--log.level=info", "--log.format=logfmt"),
    ]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
    try:
        server = Server(until(lambda: _listens(process, log), bool))
        until(lambda: server.get("/-/ready")[0], lambda status: status == 200)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


def _listens(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return where a server listens; empty where it does not yet."""
    written = log.read_text()
    assert process.poll() is None, written
    found = re.search(r'msg="Listening on".* address=([\d.]+:\d+)', written)
    return found[1] if found else ""
