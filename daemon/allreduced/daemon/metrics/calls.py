"""Counts how calls of collectives end. One table entry and one histogram per call: the hot path comes through here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.histogram import Histogram
from allreduced.daemon.submission import KINDS

SIZES = (("4KiB", 12), ("64KiB", 16), ("1MiB", 20), ("16MiB", 24), ("256MiB", 28))
"""Size classes: label, and the power of two of its largest size."""

LARGER = "larger"
"""The label of what is in none of them."""

SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Seconds up to which each bucket of the durations goes."""

UNKNOWN = "unknown"
"""The kind of calls of no known kind: what clients write must not make series."""

_BITS = 64
_LABELS = (*(label for label, _ in SIZES), LARGER)
_CLASS = tuple(next((at for at, (_, power) in enumerate(SIZES) if bits <= power), len(SIZES)) for bits in range(_BITS))
_ITEM_BYTES = tuple({int(dtype): dtype.itemsize for dtype in DType}.get(code, 0) for code in range(256))


@dataclass(slots=True)
class KindCount:
    """Calls of one kind. ``nbytes``: of the tensors of those that ended well."""

    delivered: int = 0
    nbytes: int = 0
    failed: int = 0
    seconds: list[Histogram | None] = field(default_factory=lambda: [None] * len(_LABELS))
    """By size class."""

    def durations(self) -> dict[str, Histogram]:
        """Return the histograms that are not empty, by label of the size class."""
        return {
            label: histogram for label, histogram in zip(_LABELS, self.seconds, strict=True) if histogram is not None
        }


class CallMeter:
    """Implements ``ports.Meter``: calls of the ranks of this node, each rank's own."""

    def __init__(self) -> None:
        self.kinds: dict[str, KindCount] = {kind: KindCount() for kind in KINDS}
        self.errors: Counter[tuple[str, str]] = Counter()
        """By kind and code of the error."""

    def delivered(self, call: Submitted, elapsed: float) -> None:
        """Take note of a call that ended well, ``elapsed`` seconds after it was made."""
        fingerprint = call.fingerprint
        count = self.kinds.get(fingerprint.kind) or self._unknown()
        nbytes = fingerprint.count * _ITEM_BYTES[fingerprint.dtype]
        count.delivered += 1
        count.nbytes += nbytes
        bits = (nbytes - 1).bit_length()
        place = _CLASS[bits] if bits < _BITS else len(SIZES)
        histogram = count.seconds[place]
        if histogram is None:
            histogram = count.seconds[place] = Histogram(SECONDS)
        histogram.observe(elapsed)

    def failed(self, call: Submitted, error: AllReducedError) -> None:
        """Take note of a call that failed."""
        kind = call.fingerprint.kind
        count = self.kinds.get(kind)
        if count is None:
            kind, count = UNKNOWN, self._unknown()
        count.failed += 1
        self.errors[kind, error.code] += 1

    def _unknown(self) -> KindCount:
        return self.kinds.setdefault(UNKNOWN, KindCount())
