"""An operation of a group that lives on one node: a single reduction of all local inputs."""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import Reduce
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.flights import Job
from allreduced.daemon.engine.operation import Operation
from allreduced.daemon.engine.region import Region


class Solo:
    """Does what ``Execution`` does for a group of one member, at a fraction of its cost."""

    __slots__ = ("_context", "_count", "_dtype", "_operation", "_reduction", "_sources", "final", "nbytes", "result")

    scratch_bytes = 0

    def __init__(
        self,
        context: Context,
        operation: Operation,
        dtype: DType,
        reduction: Reduction,
        nbytes: int,
        sources: Sequence[Region],
    ) -> None:
        self._context = context
        self._operation = operation
        self._dtype = dtype
        self._reduction = reduction
        self._sources = tuple(sources)
        self.nbytes = nbytes
        self.result = Region(-1, 0, 0)
        self.final = False

    @property
    def complete(self) -> bool:
        """True when the result is there."""
        return self.final

    def place(self, result: Region, scratch: Region) -> None:
        """Set the memory of the result."""
        del scratch
        self.result = result

    def start(self) -> None:
        """Reduce."""
        operation, context = self._operation, self._context
        number = context.number()
        context.jobs[number] = Job(operation, None, None, 0, 0, True)
        operation.outstanding += 1
        operation.source_readers += 1
        divisor = operation.group.size if self._reduction is Reduction.MEAN else 1
        context.out.append(
            Reduce(
                number,
                self._dtype,
                self._reduction,
                divisor,
                self.nbytes // self._dtype.itemsize,
                self._sources,
                self.result,
                operation.priority,
                share=operation.group.key.uid,
            )
        )

    def reduced(self, job: Job) -> None:
        """Take note that the result is there."""
        del job
        self.final = True

    def dispose(self) -> None:
        """Do nothing: there are no circles."""

    def unserved(self) -> list[int]:
        """Return nothing: there are no peers."""
        return []
