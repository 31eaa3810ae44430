"""`python -m voltapile.kernels.cuda --arch sm_70 [-k WORD]`: compile instances, print resources.

With --ptx DIR: write compute_70 PTX of all of them there. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from voltapile.kernels.cuda.compile import compile_instance, ptx_name, write_whole
from voltapile.kernels.cuda.nvrtc import CompileError
from voltapile.kernels.cuda.table import INSTANCES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m voltapile.kernels.cuda", description=__doc__)
    parser.add_argument("--arch", default="sm_70", help="sm_70, sm_75, sm_90, or compute_70 for PTX")
    parser.add_argument("-k", default="", help="only instances whose name holds this")
    parser.add_argument("--ptx", type=Path, help="write PTX for compute_70 to this folder")
    args = parser.parse_args()
    failed = 0
    for instance in (each for each in INSTANCES if args.k in each.name):
        began = time.perf_counter()
        arch = "compute_70" if args.ptx else args.arch
        try:
            code = compile_instance(instance, arch)
        except CompileError as error:
            failed += 1
            print(f"FAILED {instance.name}\n{error}")
            continue
        if args.ptx:
            write_whole(args.ptx / ptx_name(instance), code)
        print(f"{instance.name}: {len(code)} bytes, {time.perf_counter() - began:.1f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
