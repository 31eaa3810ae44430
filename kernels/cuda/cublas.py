"""cuBLAS's product of halves, called so that it may be recorded.

cupy refuses its cuBLAS while a step is recorded, and sets the stream at each call, which takes the
workspace away again. Here the stream and a workspace of ours are set once. Knows addresses only.
"""

from __future__ import annotations

import ctypes

HALF, SINGLE, SUMS_IN_SINGLE, ANY_KERNEL = 2, 0, 68, -1  # of values, of sums, of the algorithm
AS_IT_IS, TRANSPOSED = 0, 1
WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper; half of it would do before


class LibraryError(RuntimeError):
    """status: cuBLAS's own."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"cuBLAS: {what} gave status {status}")
        self.status = status


def load_cublas(version: int) -> ctypes.CDLL:
    """The library that cupy has loaded; version: CUDA's, as its runtime tells it."""
    return ctypes.CDLL(f"libcublas.so.{version // 1000}")


class Library:
    """handle: of cuBLAS. stream, workspace: addresses."""

    def __init__(
        self, library: ctypes.CDLL, handle: int, stream: int, workspace: int, nbytes: int
    ) -> None:
        self._library, self._handle = library, ctypes.c_void_p(handle)
        self._call("SetStream_v2", ctypes.c_void_p(stream))  # and the workspace after it
        self._call("SetWorkspace_v2", ctypes.c_void_p(workspace), ctypes.c_size_t(nbytes))

    def product(
        self, weight: int, x: int, out: int, shape: tuple[int, int, int], factor: float, adds: bool
    ) -> None:
        """out [T, N] (+)= factor * x [T, K] @ weight[N, K].T of halves; shape: (T, N, K)."""
        tokens, rows, columns = shape
        alpha, beta = ctypes.c_float(factor), ctypes.c_float(adds)
        self._call(
            "GemmEx",
            TRANSPOSED,
            AS_IT_IS,
            *(rows, tokens, columns),
            ctypes.byref(alpha),
            *(ctypes.c_void_p(weight), HALF, columns),
            *(ctypes.c_void_p(x), HALF, columns),
            ctypes.byref(beta),
            *(ctypes.c_void_p(out), SINGLE, rows),
            SUMS_IN_SINGLE,
            ANY_KERNEL,
        )

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, f"cublas{name}")(self._handle, *args)
        if status:
            raise LibraryError(name, status)
