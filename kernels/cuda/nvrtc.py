"""NVRTC, the CUDA compiler as a library, through ctypes. Needs no GPU and no driver.

Looks in NVIDIA's Python wheels first, then where the dynamic loader looks. Knows source text,
options and bytes; neither our files nor what is done with the result.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

# Standard headers that NVRTC lacks and our sources include.
HEADERS = {
    "cstdint": (
        "#pragma once\n"
        "typedef signed char int8_t; typedef short int16_t; typedef int int32_t;\n"
        "typedef long long int64_t; typedef unsigned char uint8_t;\n"
        "typedef unsigned short uint16_t; typedef unsigned int uint32_t;\n"
        "typedef unsigned long long uint64_t;\n"
        "namespace std { using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;\n"
        "using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; }\n"
    ),
}
_TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-12")


class CompileError(RuntimeError):
    """A kernel does not compile; the message is the compiler's log."""


class NvrtcMissingError(RuntimeError):
    """libnvrtc is not on this computer."""


@functools.cache
def libnvrtc() -> ctypes.CDLL:
    """The loaded libnvrtc. Raises NvrtcMissingError."""
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise NvrtcMissingError(
        "libnvrtc was not found: install the extra `voltapile[cuda]`, or the CUDA toolkit"
    )


@functools.cache
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(libnvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def include_folders() -> tuple[str, ...]:
    """Where cuda_fp16.h and its like are, the wheels that belong to this NVRTC first."""
    major = version()[0]
    wheels = [root / f"cu{major}/include" for root in _wheel_roots()]
    if major == 12:
        wheels += [root / "cuda_runtime/include" for root in _wheel_roots()]
    places = [*wheels, *(Path(root) / "include" for root in _TOOLKITS)]
    found = [place for place in places if (place / "cuda_fp16.h").is_file()]
    if not found:
        return ()
    # What it includes in turn is in a wheel of its own, or in a folder below.
    beside = found[0].parent.parent / "cuda_cccl/include", found[0] / "cccl"
    return tuple(str(place) for place in (found[0], *beside) if place.is_dir())


def compile_source(name: str, source: str, options: Sequence[str], arch: str) -> tuple[bytes, str]:
    """A cubin for arch "sm_XX", PTX for "compute_XX"; and the log. Raises CompileError."""
    nvrtc, program = libnvrtc(), ctypes.c_void_p()
    texts = [text.encode() for text in HEADERS.values()]
    names = [header.encode() for header in HEADERS]
    count = len(HEADERS)
    array = ctypes.c_char_p * count
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            count,
            array(*texts),
            array(*names),
        )
    )
    try:
        flags = [f"--gpu-architecture={arch}", *options]
        flags += [f"--include-path={folder}" for folder in include_folders()]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), encoded)
        log = _take(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
        text = log.decode(errors="replace").rstrip("\0")
        if status != 0:
            raise CompileError(f"{name} for {arch}:\n{text}")
        kind = "CUBIN" if arch.startswith("sm_") else "PTX"
        return _take(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}"), text
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _take(program: ctypes.c_void_p, size_function: str, function: str) -> bytes:
    size = ctypes.c_size_t()
    _check(libnvrtc()[size_function](program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(libnvrtc()[function](program, data))
    return data.raw


def _check(status: int) -> None:
    if status == 0:
        return
    text = libnvrtc().nvrtcGetErrorString
    text.restype = ctypes.c_char_p
    raise RuntimeError(f"NVRTC: {text(status).decode()}")


def _wheel_roots() -> list[Path]:
    """The folders of the `nvidia` namespace package."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []


def _candidates() -> list[str]:
    """Paths of libnvrtc: CUDA 12's wheels, CUDA 13's, toolkits, the loader's own search."""
    found: list[str] = []
    for folder in ("cuda_nvrtc/lib", "cu12/lib", "cu13/lib"):
        for root in _wheel_roots():
            found += sorted(
                str(path) for path in (root / folder).glob("libnvrtc.so.*") if path.is_file()
            )
    for toolkit in _TOOLKITS:
        found += sorted(str(path) for path in Path(toolkit).glob("lib64/libnvrtc.so.*"))
    return [*found, "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
