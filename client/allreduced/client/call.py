"""From the arguments of a collective to an :class:`Operation`, with every check that needs no other rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from allreduced.client.arguments import check_deadline, check_text, whole
from allreduced.client.arrays import Array, Tensor, read_out, read_tensor
from allreduced.client.operation import Operation, Part, Sink, signature
from allreduced.client.overlap import Use, find_conflict
from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction
from allreduced.protocol.shapes import shape_text, shapes_text

MAX_PRIORITY = (1 << 31) - 1

CANONICAL = "canonical"
"""The algorithm whose order of reduction depends on nothing but the ranks and their nodes."""


class Options(NamedTuple):
    """The keywords that all collectives have."""

    name: str | None
    deadline: float | None
    priority: int
    algorithm: str | None
    deterministic: bool = False

    def checked(self) -> tuple[str, float, int, str]:
        """Return name, deadline (0: the group's default), priority and algorithm.

        :raises InvalidArgument: one of them is out of range.
        """
        name = "" if self.name is None else check_text("name", self.name)
        priority = self.priority if type(self.priority) is int else whole(self.priority)
        if priority is None or not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
            raise InvalidArgument(f"priority is {self.priority!r}; it is a whole number of 32 bits, 0 is normal")
        algorithm = ""
        if self.algorithm is not None:
            algorithm = check_text("algorithm", self.algorithm)
            if len(algorithm.encode()) > 64:
                raise InvalidArgument(f"algorithm {algorithm[:40]!r}… is not known")
        if self.deterministic:
            if algorithm not in ("", CANONICAL):
                raise InvalidArgument(
                    f"deterministic=True allows only algorithm={CANONICAL!r}, not {algorithm!r}",
                    hint="leave algorithm out",
                )
            algorithm = CANONICAL
        deadline = 0.0 if self.deadline is None else check_deadline("deadline", self.deadline)
        return name, deadline, priority, algorithm


def all_reduce(x: object, *, op: str, out: object, view: bool, options: Options) -> Operation:
    """Return the operation of ``all_reduce(x)``."""
    tensor = read_tensor(x)
    reduction = parse_reduction(op, tensor.dtype)
    return _one("all_reduce", tensor, reduction, root=-1, sends=True, out=out, view=view, options=options)


def broadcast(x: object, *, root: int, rank: int, size: int, out: object, view: bool, options: Options) -> Operation:
    """Return the operation of ``broadcast(x, root)``."""
    source = whole(root)
    if source is None or not 0 <= source < size:
        raise InvalidArgument(f"root is {root!r}; with size {size} it is 0 to {size - 1}")
    tensor = read_tensor(x)
    sends = rank == source
    return _one("broadcast", tensor, Reduction.COPY, root=source, sends=sends, out=out, view=view, options=options)


def barrier(*, options: Options) -> Operation:
    """Return the operation of ``barrier()``."""
    name, deadline, priority, algorithm = options.checked()
    part = Part(signature("barrier", DType.INT32, Reduction.SUM, "", 0, -1), name, (), ())
    return Operation(
        (part,), results=0, single=True, view=False, deadline=deadline, priority=priority, algorithm=algorithm
    )


def all_reduce_many(
    tensors: Sequence[object], *, op: str, out: Sequence[object] | None, view: bool, options: Options
) -> Operation:
    """Return the operation of ``all_reduce_many(tensors)``: one part for each dtype, in the order of their codes."""
    name, deadline, priority, algorithm = options.checked()
    given = [read_tensor(x, what=f"tensors[{index}]") for index, x in enumerate(_listed("tensors", tensors))]
    out = None if out is None else _listed("out", out)
    if out is not None and len(out) != len(given):
        raise InvalidArgument(f"out has {len(out)} arrays, there are {len(given)} tensors")
    sinks: dict[DType, list[tuple[Tensor, Sink]]] = {}
    for index, tensor in enumerate(given):
        target = None if out is None else out[index]
        sink = _sink(index, tensor, target, view, what=f"out[{index}]")
        sinks.setdefault(tensor.dtype, []).append((tensor, sink))
    if out is not None:
        _check_overlap(given, [sink for pairs in sinks.values() for _, sink in pairs])
    # Every part tells all shapes, and all dtypes where there are several, so that lists which differ anywhere are a
    # mismatch and not a wait for the deadline, or worse.
    shape = shapes_text([tensor.array.shape for tensor in given], _labels(given) if len(sinks) > 1 else None)
    parts: list[Part] = []
    for dtype in sorted(sinks) or (_dtype_of_none(op),):
        pairs = sinks.get(dtype, [])
        count = sum(tensor.array.size for tensor, _ in pairs)
        part = Part(
            signature("all_reduce_many", dtype, parse_reduction(op, dtype), shape, count, -1),
            name,  # where there are several parts the conversation gives names to all but the first
            tuple(tensor.array for tensor, _ in pairs),
            tuple(sink for _, sink in pairs),
        )
        parts.append(part)
    return Operation(
        tuple(parts),
        results=len(given),
        single=False,
        view=view,
        deadline=deadline,
        priority=priority,
        algorithm=algorithm,
    )


def _labels(tensors: Sequence[Tensor]) -> list[str]:
    return [tensor.dtype.label for tensor in tensors]


def _dtype_of_none(op: str) -> DType:
    """Return the dtype under which an empty list is told: one for which ``op`` is defined, the same on all ranks."""
    return DType.INT32 if op in ("band", "bor", "bxor") else DType.FLOAT32


def _check_overlap(tensors: Sequence[Tensor], sinks: Sequence[Sink]) -> None:
    """Check that no result would overwrite another, nor a tensor that is not read yet.

    Tensors of one dtype are read together, before the first of their results is written; those of another may not be.

    :raises InvalidArgument: memory is shared; names who shares it.
    """
    uses = [
        Use(f"out[{sink.place}]", sink.out, written=True, order=tensors[sink.place].dtype)
        for sink in sinks
        if sink.out is not None
    ]
    if len({tensor.dtype for tensor in tensors}) > 1:
        uses += [Use(f"tensors[{at}]", tensor.array, False, tensor.dtype) for at, tensor in enumerate(tensors)]
    conflict = find_conflict(uses)
    if conflict is not None:
        names = " and ".join(sorted(use.what for use in conflict))
        raise InvalidArgument(f"{names} share memory", hint="give each result memory of its own")


def _listed(what: str, value: Sequence[object]) -> list[object]:
    # An array of two dimensions would do as the list of its rows, which is never what is meant.
    if not hasattr(value, "__dlpack__"):
        try:
            return list(value)
        except TypeError:
            pass
    raise InvalidArgument(
        f"{what} is a {type(value).__name__}; it must be a list of tensors", hint="for one tensor call all_reduce"
    )


def _one(
    kind: str,
    tensor: Tensor,
    reduction: Reduction,
    *,
    root: int,
    sends: bool,
    out: object,
    view: bool,
    options: Options,
) -> Operation:
    name, deadline, priority, algorithm = options.checked()
    array = tensor.array
    part = Part(
        signature(kind, tensor.dtype, reduction, _shape_text(array.shape), array.size, root),
        name,
        (array,) if sends else (),
        (_sink(0, tensor, out, view, what="out"),),
    )
    return Operation(
        (part,), results=1, single=True, view=view, deadline=deadline, priority=priority, algorithm=algorithm
    )


_shape_text = lru_cache(maxsize=4096)(shape_text)


def _sink(index: int, tensor: Tensor, out: object, view: bool, *, what: str) -> Sink:
    if view and out is not None:
        raise InvalidArgument("view=True and out= exclude each other", hint="leave one of them out")
    if view and tensor.kind.torch:
        raise InvalidArgument(
            "view=True gives read-only memory, and torch has no read-only tensors", hint="give x.numpy()"
        )
    target: Array | None = None if out is None else read_out(out, tensor, what=what)
    return Sink(index, tensor.array.shape, target, out, tensor.kind)
