"""Whoever started the agent learns whether it is ready."""

from __future__ import annotations

import json
import os

from allreduced.core.errors import ConfigError, from_wire
from allreduced.daemon.readiness import Readiness


def test_the_ready_line_tells_the_addresses_once() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        readiness = Readiness(writing)
        readiness.ready("@agent", "tcp://127.0.0.1:4123")
        readiness.failed(ConfigError("too late"))
        line = json.loads(pipe.read())
    assert line == {"ready": True, "socket": "@agent", "listen": "tcp://127.0.0.1:4123", "pid": os.getpid()}


def test_an_error_travels_with_its_facts() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        Readiness(writing).failed(ConfigError("no", path="agent.toml: $.x", hint="so"))
        code, message, hint, facts = json.loads(pipe.read())["error"]
    error = from_wire((code, message, hint, facts))
    assert isinstance(error, ConfigError)
    assert (error.message, error.hint, error.path) == ("no", "so", "agent.toml: $.x")


def test_nobody_waiting_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    Readiness(writing).ready("@agent", "")
