"""The Step log keeps frames as they were."""

from __future__ import annotations

import io

from voltapile.workers import steplog


def test_round_trip() -> None:
    steps = [[b"head", b"", memoryview(b"abc")], [b"x"]]
    file = io.BytesIO()
    for frames in steps:
        steplog.write(file, frames)
    file.seek(0)
    assert list(steplog.read(file)) == [[bytes(f) for f in frames] for frames in steps]


def test_a_torn_end_is_left_out() -> None:
    file = io.BytesIO()
    steplog.write(file, [b"first"])
    whole = len(file.getvalue())
    steplog.write(file, [b"second", b"long frame"])
    for end in range(whole, len(file.getvalue())):
        torn = io.BytesIO(file.getvalue()[:end])
        assert list(steplog.read(torn)) == [[b"first"]], end
