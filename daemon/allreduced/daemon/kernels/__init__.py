"""Native reductions and the threads that run them.

:func:`reduce` combines N inputs into one output in a single pass; :class:`Pool` does so on worker threads without the
GIL. Both take addresses, so only the driver, which owns the memory, uses this package. The order of combination is the
order of the sources, and the bits do not depend on the instruction set, on alignment or on the number of threads; only
the sign and payload of a NaN that comes from two different NaNs may. ``_native.pyi`` holds the full contract.
"""

from __future__ import annotations

from allreduced.daemon.kernels._native import Pool, instruction_set, reduce

__all__ = ["Pool", "instruction_set", "reduce"]
