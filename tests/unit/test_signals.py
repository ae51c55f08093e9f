from __future__ import annotations

import pytest

from raytrain_llama3.errors import StoppedBySignal
from raytrain_llama3.launch.signals import StopSignal


def raise_wrapped(cause: BaseException) -> None:
    """As Ray's calls do with what a signal's handler raised just as they return."""
    raise SystemError("returned a result with an exception set") from cause


def test_a_stop_that_comes_wrapped_in_another_error_is_raised_as_itself() -> None:
    stopped = StoppedBySignal("SIGINT: ended at once")
    with pytest.raises(StoppedBySignal) as caught, StopSignal().unwrapped():
        raise_wrapped(stopped)
    assert caught.value is stopped


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(SystemError, match="returned a result"), StopSignal().unwrapped():
        raise_wrapped(KeyError("x"))
