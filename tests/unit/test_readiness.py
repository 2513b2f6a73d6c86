"""Whoever started the agent learns whether it is ready."""

from __future__ import annotations

import json
import os
import secrets
import socket

from allreduced.core.errors import ConfigError, from_wire
from allreduced.daemon.readiness import Readiness


def test_the_ready_line_tells_the_addresses_once() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        readiness = Readiness(writing, {})
        readiness.ready("@agent", "tcp://127.0.0.1:4123")
        readiness.failed(ConfigError("too late"))
        line = json.loads(pipe.read())
    assert line == {"ready": True, "socket": "@agent", "listen": "tcp://127.0.0.1:4123", "pid": os.getpid()}


def test_an_error_travels_with_its_facts() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        Readiness(writing, {}).failed(ConfigError("no", path="agent.toml: $.x", hint="so"))
        code, message, hint, facts = json.loads(pipe.read())["error"]
    error = from_wire((code, message, hint, facts))
    assert isinstance(error, ConfigError)
    assert (error.message, error.hint, error.path) == ("no", "so", "agent.toml: $.x")


def test_nobody_waiting_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    Readiness(writing, {}).ready("@agent", "")
    Readiness(None, {"NOTIFY_SOCKET": "/nowhere/at/all"}).ready("@agent", "")


def test_the_service_manager_is_notified() -> None:
    name = f"allreduced-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(10.0)
        readiness = Readiness(None, {"NOTIFY_SOCKET": f"@{name}"})
        readiness.ready("@agent", "")
        assert manager.recv(1000).startswith(b"READY=1\n")
        readiness.stopping()
        assert manager.recv(1000) == b"STOPPING=1"
