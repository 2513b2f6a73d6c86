"""Typed messages to msgpack arrays and back, strictly.

:class:`Codec` reads the field types of a frozen dataclass once and generates two functions from them, as
``dataclasses`` does for ``__init__``: every value that comes in is checked for its exact type, range and length,
without a table walk per message. Everything wrong is a :class:`ProtocolError` that names message, field and fact.

Fields are told in their order. A decoder ignores further items at the end of a message or record, which a later
version may add, and refuses missing ones but for those that are :data:`ADDED_LATER`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import msgpack

from allreduced.core.errors import InternalError, ProtocolError
from allreduced.core.limits import AtMost, Between, Seconds
from allreduced.protocol import wire_error

M = TypeVar("M")

MORE_FIELDS = 64
"""Items that a later version may add to a message or record; more is refused."""

MORE_BYTES = 4096
"""Bytes of text or data that an item added by a later version may have."""

KEPT_BYTES = 64 << 10
"""Bytes of a message after which the memory that it was packed in is given back."""

SMALL = 1024
"""Bytes or items below which a body cannot make the decoder allocate much, see :meth:`Codec.unpack`."""


ADDED_LATER: Mapping[str, bool] = {"added later": True}
"""Metadata of the last fields of a message that earlier versions do not tell; they have their default then."""


class Codec(Generic[M]):
    """Packs and unpacks the messages of one class.

    ``code``: the type code, told as the first item; None where it travels elsewhere. ``outside``: fields that travel
    elsewhere (in a header) and are no items of the array; :meth:`unpack` takes them.
    """

    def __init__(self, cls: type[M], *, code: int | None, outside: tuple[str, ...] = ()) -> None:
        source = _Source(cls, code, outside)
        self.cls = cls
        self.outside = outside
        self._array: Callable[[M], object] = source.encoder
        self._message: Callable[..., M] = source.decoder
        self._items = source.most_items
        self._packers = [msgpack.Packer()]
        self._limits: dict[str, int | bool] = {
            "use_list": False,
            "raw": False,
            "strict_map_key": True,
            "max_array_len": max(source.most_items, SMALL),
            "max_str_len": max(source.most_text, MORE_BYTES),
            "max_bin_len": max(source.most_bytes, MORE_BYTES),
            "max_map_len": max(source.most_pairs, MORE_FIELDS),
            "max_ext_len": 0,
        }
        self._short_arrays = {**self._limits, "max_array_len": SMALL}

    def pack(self, message: M) -> bytes:
        """Return the msgpack array of the message.

        Values are trusted to be what the types say; names that users gave are checked by ``limits.check_name``.

        :raises InternalError: a value cannot be told at all.
        """
        # Making one costs more than most messages do. Taken from the list: a signal's handler may come in between.
        packer = self._packers.pop() if self._packers else msgpack.Packer()
        try:
            body = cast("bytes", packer.pack(self._array(message)))
            if len(body) <= KEPT_BYTES:
                self._packers.append(packer)
            return body
        except (ValueError, TypeError, OverflowError) as error:
            raise InternalError(f"{self.cls.__name__} cannot be sent: {error}; it is {message!r:.2000}") from error

    def unpack(self, body: bytes | bytearray | memoryview, *outside: int) -> M:
        """Return the message that ``body`` tells. ``outside``: the values of the fields that travelled elsewhere.

        :raises ProtocolError: anything about it is wrong.
        """
        try:
            if self._items <= SMALL or len(body) <= SMALL:
                array = msgpack.unpackb(body, **self._limits)
            else:
                array = self._unpack_large(body)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise ProtocolError(f"{self.cls.__name__}: the body is not msgpack within the limits: {error}") from error
        if type(array) is not tuple:
            raise ProtocolError(f"{self.cls.__name__}: the body is {_show(array)}, it must be an array")
        return self._message(array, *outside)

    def _unpack_large(self, body: bytes | bytearray | memoryview) -> object:
        """Unpack a body that may have long arrays. Most have none: only where one shows is the body walked over."""
        try:
            return msgpack.unpackb(body, **self._short_arrays)
        except ValueError:
            _skip(body)
            return msgpack.unpackb(body, **self._limits)


def _skip(body: bytes | bytearray | memoryview) -> None:
    """Walk over the whole body without building anything.

    The length of an array is allocated before its items are seen, so nested arrays that only claim to be long could
    make a small body cost a lot of memory. A body that passes here has the items that it claims.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(body))
    unpacker.feed(body)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ValueError("it ends early") from None


def _show(value: object) -> str:
    """Return a short text of a value that was refused: what kind, and how it looks where that is short.

    Of bytes only how many: they are tensors and proofs of secrets, and errors get into logs.
    """
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        shown = repr(value[:40])
        return shown if len(value) <= 40 else f"{shown}… of length {len(value)}"
    if isinstance(value, tuple):
        return f"an array of {len(value)}"
    return "a map" if isinstance(value, dict) else f"a {type(value).__name__}"


def _bad(path: str, value: object, wanted: str) -> ProtocolError:
    return ProtocolError(f"{path} is {_show(value)}, it must be {wanted}")


def _bad_bytes(path: str, value: object, wanted: str) -> ProtocolError:
    """Refuse what should have been bytes without showing it, as :func:`_show` does not show bytes."""
    shown = f"text of {len(value)} characters" if isinstance(value, str) else _show(value)
    return ProtocolError(f"{path} is {shown}, it must be {wanted}")


def _fit(path: str, value: object, names: tuple[str, ...], defaults: tuple[object, ...]) -> tuple[object, ...]:
    """Return the known fields of an array that has not exactly as many items as there are.

    ``defaults``: of the last fields, those that an earlier version does not tell.
    """
    if type(value) is not tuple:
        raise _bad(path, value, f"an array of {len(names)} fields")
    if len(names) - len(defaults) <= len(value) < len(names):
        return value + defaults[len(value) - len(names) :]
    if len(value) < len(names):
        raise ProtocolError(f"{path} lacks the field {names[len(value)]}: {len(value)} items of {len(names)}")
    if len(value) > len(names) + MORE_FIELDS:
        raise ProtocolError(f"{path} has {len(value)} items, {len(names)} are known")
    return value[: len(names)]


def _float(path: str, value: object, wanted: str) -> float:
    """Return a whole number as the float that it stands for: some languages know only one kind of number."""
    if type(value) is not int or value.bit_length() > 64:
        raise _bad(path, value, wanted)
    return float(value)


class _Source:
    """The generated functions of one class, and the largest lengths that its fields allow."""

    def __init__(self, cls: type, code: int | None, outside: tuple[str, ...]) -> None:
        self.most_items = self.most_text = self.most_bytes = self.most_pairs = 0
        self._names = 0
        self._helpers: dict[str, Any] = {
            "bad": _bad,
            "bad_bytes": _bad_bytes,
            "fit": _fit,
            "as_float": _float,
            "new": object.__new__,
            "check_error": wire_error.check,
            "bounded": wire_error.bounded,
        }
        self.encoder = self._record_encoder(cls, code, outside)
        self.decoder = self._record_decoder(cls, cls.__name__, code, outside)

    # Names and functions

    def _fresh(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _helper(self, value: object) -> str:
        name = self._fresh()
        self._helpers[name] = value
        return name

    def _function(self, parameters: str, lines: list[str]) -> Callable[..., Any]:
        body = "".join(f"    {line}\n" for line in lines)
        namespace = dict(self._helpers)
        exec(f"def generated({parameters}):\n{body}", namespace)  # text from field types only, as dataclasses does
        return cast("Callable[..., Any]", namespace["generated"])

    # Records: dataclasses and named tuples

    def _record_encoder(self, cls: type, code: int | None, outside: tuple[str, ...]) -> Callable[..., Any]:
        items = [] if code is None else [str(code)]
        items += [self._encode(f"m.{name}", hint) for name, hint in _fields(cls).items() if name not in outside]
        return self._function("m", [f"return [{', '.join(items)}]"])

    def _record_decoder(self, cls: type, path: str, code: int | None, outside: tuple[str, ...]) -> Callable[..., Any]:
        hints = _fields(cls)
        values = {name: self._fresh() for name in hints}
        inside = [name for name in hints if name not in outside]
        targets = [values[name] for name in inside]
        names = tuple(inside)
        if code is not None:
            targets, names = ["_", *targets], ("type code", *names)
        self.most_items = max(self.most_items, len(names) + MORE_FIELDS)
        defaults = self._helper(_added_later(cls))
        lines = [
            f"if type(a) is not tuple or len(a) != {len(names)}: a = fit({path!r}, a, {names!r}, {defaults})",
            f"[{', '.join(targets)}] = a",
        ]
        for name, hint in hints.items():
            lines += self._check(values[name], hint, f"{path}.{name}")
        if dataclasses.is_dataclass(cls):
            # A frozen dataclass sets its fields one by one with object.__setattr__; its slots are faster.
            lines.append(f"m = new({self._helper(cls)})")
            lines += [f"{self._helper(cls.__dict__[name].__set__)}(m, {value})" for name, value in values.items()]
            lines.append("return m")
        else:
            lines.append(f"return {self._helper(cls)}({', '.join(values.values())})")
        return self._function(", ".join(["a", *(values[name] for name in outside)]), lines)

    # Fields

    def _encode(self, value: str, hint: Any) -> str:
        hint, _ = _split(hint)
        if hint is wire_error.Marker:
            return f"bounded({value})"
        if _is_record(hint):
            return f"{self._helper(self._record_encoder(hint, None, ()))}({value})"
        if get_origin(hint) is tuple and get_args(hint)[-1] is ... and _is_record(get_args(hint)[0]):
            return f"[*map({self._helper(self._record_encoder(get_args(hint)[0], None, ()))}, {value})]"
        return value

    def _check(self, value: str, hint: Any, path: str) -> list[str]:
        """Return the lines that check the variable ``value``, and bring it into its final form."""
        hint, limit = _split(hint)
        if hint is wire_error.Marker:
            self.most_items = max(self.most_items, wire_error.MAX_ITEMS)
            self.most_text = max(self.most_text, wire_error.MAX_TEXT)
            self.most_pairs = max(self.most_pairs, wire_error.MAX_ITEMS)
            return [f"{value} = check_error({path!r}, {value})"]
        if hint is bool:
            return [_refuse(f"{value} is not True and {value} is not False", path, value, "true or false")]
        if hint is int and isinstance(limit, Between):
            low, high = limit.lowest, limit.highest
            wrong = f"type({value}) is not int or not {low} <= {value} <= {high}"
            return [_refuse(wrong, path, value, f"an integer from {low} to {high}")]
        if hint is float and isinstance(limit, Seconds):
            wanted = f"a number from 0 to {limit.highest:g}"
            return [
                f"if type({value}) is not float: {value} = as_float({path!r}, {value}, {wanted!r})",
                _refuse(f"not 0.0 <= {value} <= {limit.highest!r}", path, value, wanted),
            ]
        if hint is str and isinstance(limit, AtMost):
            most = limit.length
            self.most_text = max(self.most_text, most)
            too_long = f"len({value}) > {most} or not {value}.isascii() and len({value}.encode()) > {most}"
            return [_refuse(f"type({value}) is not str or {too_long}", path, value, f"text of at most {most} bytes")]
        if hint is bytes and isinstance(limit, AtMost):
            self.most_bytes = max(self.most_bytes, limit.length)
            wrong = f"type({value}) is not bytes or len({value}) > {limit.length}"
            return [_refuse(wrong, path, value, f"at most {limit.length} bytes", "bad_bytes")]
        if type(None) in get_args(hint):
            [other] = [choice for choice in get_args(hint) if choice is not type(None)]
            inner = self._check(value, Annotated[other, limit] if limit else other, path)
            return [f"if {value} is not None:", *(f"    {line}" for line in inner)]
        if _is_record(hint):
            decoder = self._helper(self._record_decoder(hint, path, None, ()))
            return [f"{value} = {decoder}({value})"]
        if get_origin(hint) is tuple:
            return self._check_tuple(value, hint, limit, path)
        raise TypeError(f"{path}: there is no rule for {hint!r} with {limit!r}")

    def _check_tuple(self, value: str, hint: Any, limit: object, path: str) -> list[str]:
        kinds = get_args(hint)
        if kinds[-1] is not ...:
            self.most_items = max(self.most_items, len(kinds))
            parts = [self._fresh() for _ in kinds]
            wrong = f"type({value}) is not tuple or len({value}) != {len(kinds)}"
            lines = [
                _refuse(wrong, path, value, f"an array of {len(kinds)}"),
                f"[{', '.join(parts)}] = {value}",
            ]
            for place, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
                lines += self._check(part, kind, f"{path}[{place}]")
            return [*lines, f"{value} = ({', '.join(parts)},)"]
        if not isinstance(limit, AtMost):
            raise TypeError(f"{path}: a tuple needs a greatest length")
        self.most_items = max(self.most_items, limit.length)
        wrong = f"type({value}) is not tuple or len({value}) > {limit.length}"
        lines = [_refuse(wrong, path, value, f"an array of at most {limit.length}")]
        item = self._fresh()
        inner = self._check(item, kinds[0], f"{path}[]")
        if _split(kinds[0])[0] in (int, str):  # nothing to convert: only look at each
            return [*lines, f"for {item} in {value}:", *(f"    {line}" for line in inner)]
        convert = self._helper(self._function(item, [*inner, f"return {item}"]))
        return [*lines, f"{value} = (*map({convert}, {value}),)"]


def _refuse(wrong: str, path: str, value: str, wanted: str, error: str = "bad") -> str:
    """Return the line that refuses ``value`` where the condition ``wrong`` holds."""
    return f"if {wrong}: raise {error}({path!r}, {value}, {wanted!r})"


def _fields(cls: type) -> Mapping[str, Any]:
    """Return the fields of a record in their order, with their types and limits."""
    return get_type_hints(cls, include_extras=True, localns={"WireError": wire_error.Marker})


def _added_later(cls: type) -> tuple[object, ...]:
    """Return the defaults of the last fields of a record, which messages of earlier versions lack."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return tuple(field.default for field in fields if field.metadata == ADDED_LATER)


def _split(hint: Any) -> tuple[Any, object]:
    """Return the plain type and the limit of an annotated one."""
    if get_origin(hint) is Annotated:
        plain, limit = get_args(hint)
        return plain, limit
    return hint, None


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))
