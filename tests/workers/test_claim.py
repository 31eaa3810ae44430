"""One process for a name."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import uuid4

from voltapile.workers.claim import Claim

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
