"""One process for a name."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import uuid4

import pytest
from voltapile.workers import claim as claim_module
from voltapile.workers.claim import NOBODY, UNSEEN, Claim

OTHER = """
import sys, time
from voltapile.workers.claim import Claim
print(Claim(sys.argv[1]).take(), flush=True)
print(Claim(sys.argv[2]).take(), flush=True)
time.sleep(60)
"""


def test_who_holds_it() -> None:
    name, other = uuid4().hex, uuid4().hex
    mine, theirs = Claim(name), Claim(other)
    assert mine.take() == mine.take() == Claim(name).take() == 0
    command = [sys.executable, "-c", OTHER, name, other]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == os.getpid()
        assert int(process.stdout.readline()) == 0
        assert theirs.take() == theirs.take() == process.pid
        process.kill()
    assert theirs.take() == 0
    theirs.close()
    mine.close()


FULL = """
import socket, sys, time
held = socket.socket(socket.AF_UNIX)
held.bind("\\0voltapile/" + sys.argv[1])
held.listen(0)
askers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for each in askers:
    each.setblocking(False)
    try:
        each.connect(held.getsockname())
    except BlockingIOError:
        print("full", flush=True)
        time.sleep(60)
"""


def test_one_that_does_not_say_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Another user may take our name and let nobody ask: we start all the same."""
    name = uuid4().hex
    with subprocess.Popen([sys.executable, "-c", FULL, name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"full\n"
        assert Claim(name).take() == NOBODY
        process.kill()
    assert "does not say whose" in caplog.text


@pytest.mark.parametrize(
    ("told", "holder", "said"),
    [((12, os.getuid() + 1, 0), NOBODY, f"user {os.getuid() + 1}'s process 12"),
     ((0, os.getuid(), 0), UNSEEN, ""), ((0, 65534, 0), NOBODY, "user 65534's")],
)  # fmt: skip
def test_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    told: tuple[int, int, int], holder: int, said: str,
) -> None:  # fmt: skip
    """Another user's process keeps nobody from starting; a container's of this user does."""
    name = uuid4().hex
    first, second = Claim(name), Claim(name)
    first.take()

    class Told:
        size = claim_module._CREDENTIALS.size
        unpack = staticmethod(lambda raw: told)

    monkeypatch.setattr(claim_module, "_CREDENTIALS", Told)
    assert second.take() == holder
    assert said in caplog.text
    first.close()


def test_who_has_asked_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "MOST_ASKED", 0)
    name = uuid4().hex
    mine = Claim(name)
    mine.take()
    assert Claim(name)._holder() == os.getpid()
    assert Claim(name)._holder() == NOBODY, "there is no room, so nobody can ask"
    mine.answer()
    assert Claim(name)._holder() == os.getpid()
    mine.close()
    mine.answer()
