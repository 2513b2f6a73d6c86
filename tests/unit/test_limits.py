from __future__ import annotations

import pytest

from allreduced.core.errors import InvalidArgument
from allreduced.core.limits import MAX_NAME, check_name


@pytest.mark.parametrize("name", ["", "layer1.weight", "x" * MAX_NAME, "é" * (MAX_NAME // 2), "a\nb"])
def test_names_within_the_limit(name: str) -> None:
    check_name("name", name)


@pytest.mark.parametrize("name", ["x" * (MAX_NAME + 1), "é" * (MAX_NAME // 2 + 1)])
def test_long_names_are_refused_with_their_length(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"job has {len(name.encode())} bytes, at most 256 are allowed"):
        check_name("job", name)


def test_names_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be told in UTF-8"):
        check_name("name", "\udc80")
