"""What other libraries raise is told in one line that says what it was."""

from __future__ import annotations

import pickle

import pytest

from megatrain.errors import SampleError, first_line, typed_line


@pytest.mark.parametrize(
    ("error", "first", "typed"),
    [
        (ValueError("  no such thing.\n  see the manual"), "no such thing", "ValueError: no such thing"),
        (ValueError("the following are wrong:\n\n - top_p\n - top_k"), "the following are wrong: - top_p", None),
        (ValueError("ends with it:"), "ends with it:", None),
        (ValueError(" \n"), "ValueError", "ValueError"),
        (KeyError("model_type"), "KeyError: 'model_type'", "KeyError: 'model_type'"),
        (OSError(28, "No space left"), "[Errno 28] No space left", "OSError: [Errno 28] No space left"),
        (ValueError("ValueError-like text"), "ValueError-like text", "ValueError: ValueError-like text"),
    ],
)
def test_an_exception_in_a_line(error: Exception, first: str, typed: str | None) -> None:
    assert first_line(error) == first
    assert typed_line(error) == (typed or f"ValueError: {first}")


def test_an_error_survives_the_way_between_processes() -> None:
    error = SampleError("what", reason="why", where="there", fix="so")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.reason) == (SampleError, str(error), "why")
