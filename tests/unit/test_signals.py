from __future__ import annotations

from collections.abc import Callable

import pytest

from raytrain_llama3.errors import StoppedBySignal
from raytrain_llama3.launch.signals import StopSignal


def raise_wrapped(cause: BaseException) -> None:
    """As Ray's calls do with what a signal's handler raised just as they return."""
    raise SystemError("returned a result with an exception set") from cause


def raise_translated(cause: BaseException) -> None:
    """As a library does that takes any error for one of its own kind (`inspect`, of a signature)."""
    try:
        raise_wrapped(cause)
    except SystemError:
        raise TypeError("unsupported callable")  # noqa: B904


@pytest.mark.parametrize("give", [raise_wrapped, raise_translated])
def test_a_stop_that_comes_wrapped_in_another_error_is_raised_as_itself(
    give: Callable[[BaseException], None],
) -> None:
    stopped = StoppedBySignal("SIGINT: ended at once")
    with pytest.raises(StoppedBySignal) as caught, StopSignal().unwrapped():
        give(stopped)
    assert caught.value is stopped


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(SystemError, match="returned a result"), StopSignal().unwrapped():
        raise_wrapped(KeyError("x"))
