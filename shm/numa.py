"""The few calls of libnuma that Voltapile makes, through py-libnuma where it works; and CPU nodes.

Every wish returns False where libnuma or a second node is missing, or a container forbids it, after
one log line: placing makes a server faster, never right. Without it, pages lie where they are first
touched, so whoever wants them on a node touches them from a thread there (`on_node`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE = 1, 2, 3
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
FOLDER = Path("/sys/devices/system/node")
REFUSED = "pages lie where they are first touched; a container needs --cap-add SYS_NICE"


@functools.cache
def libnuma() -> Any:
    """libnuma as a ctypes library, or None."""
    try:
        from numa import LIBNUMA  # type: ignore[import-untyped]

        if LIBNUMA.numa_available() >= 0:
            return LIBNUMA
        reason = f"the kernel, or this container, has no NUMA policy: {REFUSED}"
    except (ImportError, OSError, AttributeError, TypeError) as error:
        # py-libnuma loads libnuma.so while it is imported; TypeError: no such file
        reason = f"libnuma is missing ({error}): install libnuma1 (numactl-libs)"
    log.info("memory is not placed on CPU nodes: %s", reason)
    return None


def nodes_with(what: str, folder: Path | None = None) -> set[int]:
    """what: "cpu" or "memory"."""
    try:
        return set(parse((folder or FOLDER).joinpath(f"has_{what}").read_text()))
    except OSError:
        return set()


def cpus_of(node: int, folder: Path | None = None) -> set[int]:
    try:
        return set(parse((folder or FOLDER).joinpath(f"node{node}/cpulist").read_text()))
    except OSError:
        return set()


def parse(text: str) -> list[int]:
    """The numbers in a kernel list, e.g. "0-3,8" -> [0, 1, 2, 3, 8]."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def keep_near(node: int) -> bool:
    """Allocate what this thread, and threads that it starts, touch first near `node`.

    Where nodes without CPUs have memory, as the GPUs of an AC922, nothing may spill over to them:
    the nodes with CPUs are all that there is, and the kernel takes the nearest of them."""
    own = nodes_with("cpu") & nodes_with("memory")
    if own and nodes_with("memory") - own:
        return _set_policy(MPOL_BIND, sorted(own))
    return (not own or node in own) and _set_policy(MPOL_PREFERRED, [node])


def _set_policy(mode: int, nodes: Sequence[int]) -> bool:
    lib = libnuma()
    if lib is None or not nodes or min(nodes) < 0 or max(nodes) > lib.numa_max_node():
        return False
    mask = _mask(nodes)
    call = ctypes.c_int(mode), mask, ctypes.c_ulong(len(mask) * WORD_BITS + 1)
    status = lib.set_mempolicy(*call)
    if status:
        log.info("memory is not kept near CPU nodes %s: refused: %s", list(nodes), REFUSED)
    return not status


def place(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Bind pages that are not touched yet to one node, or interleave them over several."""
    lib = libnuma()
    if lib is None or not nodes or max(nodes) > lib.numa_max_node():
        return False
    mask = _mask(nodes)
    status = lib.mbind(
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(MPOL_BIND if len(nodes) == 1 else MPOL_INTERLEAVE),
        mask,
        ctypes.c_ulong(len(mask) * WORD_BITS + 1),
        ctypes.c_uint(0),
    )
    if status:
        log.info("memory is not placed on CPU nodes %s: mbind refused: %s", list(nodes), REFUSED)
    return not status


def on_node(node: int, call: Callable[[], None]) -> None:
    """Call it on a CPU of the node, if this process may choose one. Raises what it raises."""
    cpus = cpus_of(node) & os.sched_getaffinity(0)
    failure: list[Exception] = []

    def run() -> None:
        try:
            if cpus:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, cpus)  # of this thread alone
            call()
        except Exception as error:  # the caller's
            failure.append(error)

    thread = threading.Thread(target=run, name=f"node-{node}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def _mask(nodes: Sequence[int]) -> Any:
    """The kernel reads one bit less than its length says."""
    mask = (ctypes.c_ulong * (max(nodes) // WORD_BITS + 1))()
    for node in nodes:
        mask[node // WORD_BITS] |= 1 << node % WORD_BITS
    return mask
