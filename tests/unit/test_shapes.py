from __future__ import annotations

import numpy as np
import pytest

from allreduced.core.limits import MAX_SHAPE
from allreduced.protocol.shapes import LONGEST, shape_text, shapes_text


@pytest.mark.parametrize(
    ("shape", "text"),
    [((), "()"), ((5,), "(5,)"), ((3, 4), "(3, 4)"), ((0, 1 << 40), "(0, 1099511627776)"), ([2, 3], "(2, 3)")],
)
def test_one_shape(shape: tuple[int, ...], text: str) -> None:
    assert shape_text(shape) == text


def test_numpy_integers_look_like_others() -> None:
    assert shape_text(np.array([3, 4])) == "(3, 4)"


def test_many_shapes() -> None:
    assert shapes_text([(3, 4), (5,)]) == "(3, 4);(5,)"
    assert shapes_text([(3, 4)]) == "(3, 4)"
    assert shapes_text([]) == ""
    assert shapes_text([(3, 4), ()], ["float32", "int64"]) == "float32(3, 4);int64()"


def test_a_long_text_keeps_its_beginning_and_stays_different() -> None:
    many = [(length,) for length in range(1000)]
    text = shapes_text(many)
    assert text.startswith("(0,);(1,);(2,)")
    assert text[400:409] == "… sha256:"
    assert len(text) == 400 + 9 + 64
    assert len(text.encode()) <= MAX_SHAPE
    assert text == shapes_text(many)
    assert text != shapes_text([*many[:-1], (7,)])


def test_the_longest_text_that_is_told_as_it_is() -> None:
    text = shape_text([1] * 169 + [100])
    assert len(text) == LONGEST
    assert "sha256" not in text
    assert "sha256" in shape_text([1] * 169 + [1000])
