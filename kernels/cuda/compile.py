"""From an Instance to machine code: gathers its source, compiles it, keeps the result on disk.

Our own #includes are put into the text (each file once), so that the key of the cache sees them.
Code is kept by a digest of source, options, architecture and compiler. Needs no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from voltapile.kernels.cuda import nvrtc
from voltapile.kernels.cuda.launch import Instance

log = logging.getLogger(__name__)
CSRC = Path(__file__).parent / "csrc"
KERNELS = CSRC.parent.parent  # for #include "formats/q4_k.h"
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "-lineinfo")
# Of an architecture the instructions that no later one has: machine code is for one card alone.
OWN = {"sm_90": "sm_90a"}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


def cache_folder() -> Path:
    return Path.home() / ".cache" / "voltapile" / "kernels"


@functools.lru_cache(maxsize=256)
def source_of(file: str) -> str:
    """The text of a file of csrc with its own includes put in, each file once.

    They are put in wherever they stand, so an #include "..." must not depend on an #if.
    """
    return "\n".join(_lines(CSRC / file, set())) + "\n"


def compile_instance(instance: Instance, arch: str, cache: Path | None = None) -> bytes:
    """A cubin for arch "sm_XX", PTX for "compute_XX"; from the cache where it is there.

    cache: None is the user's. Raises nvrtc.CompileError.
    """
    return _compiled(instance, arch, cache, ".cubin" if arch.startswith("sm_") else ".ptx")


def compile_log(instance: Instance, arch: str, cache: Path | None = None) -> str:
    """What the compiler said of a cubin, e.g. its registers; as compile_instance."""
    return _compiled(instance, arch, cache, ".log").decode()


def _compiled(instance: Instance, arch: str, cache: Path | None, suffix: str) -> bytes:
    """One of the files that a compilation leaves in the cache."""
    folder = cache_folder() if cache is None else cache
    stem = digest(instance, arch)
    try:
        return (folder / f"{stem}{suffix}").read_bytes()
    except OSError:
        pass
    flags = _flags(instance)
    if arch.startswith("sm_"):
        flags.append("--ptxas-options=-v")
    target = OWN.get(arch, arch)
    code, said = nvrtc.compile_source(instance.file, source_of(instance.file), flags, target)
    whole = {".log": said.encode(), ".cubin" if arch.startswith("sm_") else ".ptx": code}
    try:
        for each, data in whole.items():
            write_whole(folder / f"{stem}{each}", data)
    except OSError as error:  # a home that is full or read-only: compiled again at each start
        log.warning("%s is not kept: %s", instance.name, error)
    return whole[suffix]


def compile_all(
    instances: Iterable[Instance],
    arch: str,
    threads: int,
    cache: Path | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> list[bytes]:
    """compile_instance of each, in parallel threads; `done` hears how many are ready."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        waiting = [pool.submit(compile_instance, each, arch, cache) for each in instances]
        codes = []
        for count, future in enumerate(waiting, 1):
            codes.append(future.result())
            done(count)
        return codes


def digest(instance: Instance, arch: str) -> str:
    """The name under which an instance's code is kept."""
    target = OWN.get(arch, arch)
    text = [source_of(instance.file), *_flags(instance), target, str(nvrtc.version())]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:32]


def ptx_name(instance: Instance) -> str:
    """The file of an instance in a folder of PTX that was compiled beforehand. It depends on the
    source but not on the compiler, so a stale folder is a missing file, never wrong code."""
    text = [source_of(instance.file), *_flags(instance)]
    mark = hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
    return f"{instance.function}-{mark}.ptx"


def write_whole(path: Path, data: bytes) -> None:
    """Either all of it or nothing; several processes may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _flags(instance: Instance) -> list[str]:
    fmad = "--fmad=false" if instance.is_exact else "--fmad=true"
    return [*OPTIONS, fmad, *(f"-D{key}={value}" for key, value in instance.defines)]


def _lines(path: Path, seen: set[Path]) -> Iterator[str]:
    seen.add(path)
    yield f'#line 1 "{path.name}"'
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _INCLUDE.match(line)
        if match is None:
            yield "" if line.strip() == "#pragma once" else line
            continue
        target = _find(match[1], path)
        if target not in seen:
            yield from _lines(target, seen)
        yield f'#line {number + 1} "{path.name}"'


def _find(name: str, includer: Path) -> Path:
    for folder in (includer.parent, CSRC, KERNELS):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise FileNotFoundError(f'{includer.name}: #include "{name}" is none of our files')
