"""Writes the metrics in Prometheus' text format, in steps between which the event loop does its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from allreduced.daemon.metrics.facts import Facts
from allreduced.daemon.metrics.families import families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SAMPLES_AT_ONCE = 40
"""Samples that are written before the loop may do something else: a fraction of a millisecond."""

REST = 9.0
"""After each writing there is none for so many times the time it took: scrapes take a tenth of the loop at most."""


class AgentCollector(Collector):
    """Makes the metrics of one agent when they are asked for. ``read``: returns what is known now."""

    def __init__(self, read: Callable[[], Facts]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, of one moment."""
        return families(self._read())

    def describe(self) -> Iterable[Metric]:
        """Name nothing beforehand, so that registering does not read an agent that has not started."""
        return ()


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class Exposition:
    """The registry of one agent, and the text of what is in it.

    Whoever asks while a text is being written gets that one; all others get numbers that are read after they asked.
    """

    def __init__(self, read: Callable[[], Facts]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(AgentCollector(read))
        ProcessCollector(registry=self.registry)
        self._waiting: asyncio.Task[bytes] | None = None
        self._not_before = float("-inf")

    async def text(self) -> bytes:
        """Return all metrics."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._write())
        return await asyncio.shield(self._waiting)

    async def close(self) -> None:
        """Stop writing."""
        task = self._waiting
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _write(self) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._not_before - loop.time())
            parts: list[bytes] = []
            busy, begin = 0.0, time.perf_counter()  # uvloop's own time comes in milliseconds
            for metric in self.registry.collect():
                for piece in _pieces(metric):
                    parts.append(piece)
                    busy += time.perf_counter() - begin
                    await asyncio.sleep(0)
                    begin = time.perf_counter()
            self._not_before = loop.time() + REST * busy
            return b"".join(parts)
        finally:
            self._waiting = None


def _pieces(metric: Metric) -> Iterator[bytes]:
    """Yield the text of one metric, in pieces; only the first one has its head."""
    samples = metric.samples
    for begin in range(0, max(len(samples), 1), SAMPLES_AT_ONCE):
        metric.samples = samples[begin : begin + SAMPLES_AT_ONCE]
        text = generate_latest(_One(metric))
        yield (
            text
            if begin == 0
            else b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"#"))
        )
