"""`python -m voltapile.kernels.cuda --arch sm_70 [-k WORD]`: compile instances, print resources.

With --ptx DIR: write compute_70 PTX of all of them there. With --table FILE: write the table of
resources that tests compare with, or one of another --arch to look at. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from voltapile.kernels.cuda.compile import compile_instance, ptx_name, write_whole
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.nvrtc import CompileError
from voltapile.kernels.cuda.resources import ARCHS, resources_of, table
from voltapile.kernels.cuda.table import INSTANCES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m voltapile.kernels.cuda", description=__doc__)
    parser.add_argument("--arch", help="sm_70 (the default), sm_75, sm_90 ...")
    parser.add_argument("-k", default="", help="only instances whose name holds this")
    parser.add_argument("-j", type=int, default=len(os.sched_getaffinity(0)), help="threads")
    parser.add_argument("--ptx", type=Path, help="write PTX for compute_70 to this folder")
    parser.add_argument(
        "--table", type=Path, help="write resources of the table's architectures, or of --arch"
    )
    args = parser.parse_args()
    archs = (args.arch,) if args.arch else ARCHS
    chosen = [each for each in INSTANCES if args.k in each.name]
    with ThreadPoolExecutor(args.j) as pool:
        failed = sum(
            not told for told in pool.map(lambda each: _compile(each, archs[0], args.ptx), chosen)
        )
        if args.table and not failed:
            for arch in archs:
                list(pool.map(lambda each, arch=arch: resources_of(each, arch), chosen))
            _write_table(args.table, chosen, archs)
    print(f"{len(chosen) - failed} compiled, {failed} failed")
    return min(failed, 1)


def _compile(instance: Instance, arch: str, ptx: Path | None) -> bool:
    """Whether it compiles; prints one line, or the compiler's log."""
    began = time.perf_counter()
    try:
        code = compile_instance(instance, "compute_70" if ptx else arch)
    except CompileError as error:
        print(f"FAILED {instance.name}\n{error}")
        return False
    seconds = time.perf_counter() - began
    if ptx:
        write_whole(ptx / ptx_name(instance), code)
        print(f"{instance.name}: {len(code)} bytes of PTX, {seconds:.1f} s")
        return True
    try:
        used = resources_of(instance, arch)
    except ValueError:  # a compiler whose log has another form
        print(f"{instance.name}: {len(code)} bytes, {seconds:.1f} s")
        return True
    print(
        f"{instance.name}: {used.registers} registers, {used.spilled} spilled, {used.stack} stack, "
        f"{used.shared} shared, {seconds:.1f} s"
    )
    return True


def _write_table(path: Path, instances: list[Instance], archs: Sequence[str]) -> None:
    """One line for each instance, so that a change is easy to see."""
    parts = []
    for arch, rows in table(instances, archs).items():
        lines = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
        parts.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
