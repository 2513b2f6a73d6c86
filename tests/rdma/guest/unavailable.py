"""Why there can be no guest here."""

from __future__ import annotations


class Unavailable(Exception):
    """The guest cannot be had on this machine; the text says why."""
