"""Transports are found by scheme."""

from __future__ import annotations

import pytest

from allreduced.core.errors import ConfigError
from allreduced.transports.registry import scheme_of, schemes, transport


def test_each_scheme_has_its_transport() -> None:
    for scheme in schemes():
        assert transport(scheme).scheme == scheme
        assert transport(scheme) is transport(scheme)
    assert {"inproc", "tcp"} <= set(schemes())


def test_an_unknown_scheme_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"pigeon.*inproc://, .*tcp://"):
        transport("pigeon")


def test_an_address_names_its_scheme() -> None:
    assert scheme_of("tcp://[::1]:4123") == "tcp"
    for address in ("127.0.0.1:4123", "://host", ""):
        with pytest.raises(ConfigError, match="scheme://host:port"):
            scheme_of(address)
