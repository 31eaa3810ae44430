"""How long a server takes to ready on a GPU, and how fast weights get there.

    bench/gpu_startup.py HEADER.gguf [--folder DIR] [--starts 3] [--upload]

HEADER.gguf holds a real header and may lack its data: a file of the same length is written once,
with random blocks, and so lies in the page cache. Then `voltapile serve` is started several times;
the stages are those of the worker's log. --upload tries some numbers of lanes before.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from voltapile.kernels.cuda.dummy import PLAIN, SCALES
from voltapile.shm.formats import format_of
from voltapile.shm.gguf import Gguf

TILE = 8192  # blocks that are repeated
PATIENCE = 120.0
WAYS = [(4, 8 << 20), (4, 2 << 20), (8, 2 << 20), (8, 4 << 20), (16, 2 << 20)]


def blocks(type_name: str, rng: np.random.Generator) -> bytes:
    """Random blocks of an ordinary size."""
    if type_name in PLAIN:
        values = rng.standard_normal(TILE).astype(np.float32) * 0.02
        if type_name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if type_name == "F16" else np.float32).tobytes()
    tile = rng.integers(0, 256, (TILE, format_of(type_name).block_bytes), dtype=np.uint8)
    sizes = rng.uniform(0.5, 1, TILE)
    for offset, scale in SCALES[type_name]:
        field = (sizes * scale).astype(np.float16).view(np.uint8).reshape(-1, 2)
        tile[:, offset : offset + 2] = field
    return tile.tobytes()


def fill(header: Path, path: Path) -> None:
    """A file of the header's length whose tensors are random."""
    rng, tiles = np.random.default_rng(0), dict[str, bytes]()
    with Gguf.open(header) as gguf, header.open("rb") as source, path.open("wb") as file:
        begin = min(tensor.offset for tensor in gguf.tensors.values())
        file.write(source.read(begin))
        for tensor in sorted(gguf.tensors.values(), key=lambda each: each.offset):
            file.seek(tensor.offset)
            tile = tiles.setdefault(tensor.type_name, blocks(tensor.type_name, rng))
            whole, rest = divmod(tensor.nbytes, len(tile))
            for _ in range(whole):
                file.write(tile)
            file.write(tile[:rest])
        file.truncate(source.seek(0, os.SEEK_END))


def upload(path: Path) -> None:
    from voltapile.kernels.cuda import memory, tiles
    from voltapile.kernels.cuda.device import Device

    device = Device()
    with Gguf.open(path) as gguf:
        target = device.allocate(max(t.nbytes for t in gguf.tensors.values()), "a tensor")
        for lanes, chunk in WAYS:
            memory.LANES, memory.CHUNK = lanes, chunk
            uploader = memory.Uploader(device)
            began = time.perf_counter()
            for name, tensor in gguf.tensors.items():
                data, is_tiled = gguf.data(name), tiles.has_tiles(tensor.type_name, tensor.shape)
                if is_tiled:
                    data = tiles.in_tiles(data, tensor.type_name, tensor.shape[-1])
                uploader.send(target.ptr, data)
            uploader.close()
            speed = gguf.tensor_bytes / (time.perf_counter() - began) / 1e9
            print(f"upload, {lanes:2} lanes of {chunk >> 20} MiB: {speed:.1f} GB/s", flush=True)


def start(path: Path) -> str:
    """Start a server, end it once it is ready; what it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "voltapile.gateway.cli.main", "serve", "-m", str(path)]
    program = subprocess.Popen(
        [*command, "-c", "8192", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    said, stages = [], ""
    assert program.stderr is not None
    with program.stderr as lines:
        for line in lines:
            said.append(line)
            if match := re.search(r"loaded in .*", line):
                stages = match[0]
            if line.startswith("ready") or time.monotonic() - began > PATIENCE:
                break
        seconds = time.monotonic() - began
        program.send_signal(signal.SIGTERM)
        said += lines
    code = program.wait()
    if not stages or code:
        raise SystemExit(f"exit code {code}\n{''.join(said[-20:])}")
    return f"ready after {seconds:.1f} s; the worker {stages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("header", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--upload", action="store_true")
    args = parser.parse_args()
    path = args.folder / f"{args.header.stem}-random.gguf"
    if not path.exists():
        began = time.perf_counter()
        fill(args.header, path)
        size, seconds = path.stat().st_size, time.perf_counter() - began
        print(f"wrote {size / 1e9:.1f} GB in {seconds:.1f} s", flush=True)
    if args.upload:
        upload(path)
    for number in range(1, args.starts + 1):
        print(f"start {number}: {start(path)}", flush=True)


if __name__ == "__main__":
    main()
