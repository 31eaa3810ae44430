"""voltapile bench beside llama.cpp on one CPU, in one run: prefill and decode of GGUF files.

llama.cpp is PyPI's prebuilt xllamacpp, in a virtual environment of its own:

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp
    .venv/bin/python bench/beside_llama_cpp.py --peer /tmp/peer/bin/python models/*.gguf

The two take turns, with random prompts that are new each time and sampling on both sides. A figure
is the median over the rounds. A run counts only if llama.cpp with two threads is at least 1.5 times
itself with one: otherwise the machine was busy with something else, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from voltapile.gateway.cli.bench import machine_lock

PEER = """
import json, random, sys, xllamacpp
model, threads, prompt, generate, seed = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = model, prompt + generate + 64, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.warmup = True
server = xllamacpp.Server(params)
def once(tokens, count):
    answer = server.handle_completions({"prompt": tokens, "n_predict": count, "temperature": 0,
                                        "ignore_eos": True, "cache_prompt": False})
    return (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
draw = random.Random(seed)
once([draw.randrange(300, 20000) for _ in range(64)], 4)
timings = once([draw.randrange(300, 20000) for _ in range(prompt)], generate)
print(json.dumps({"prefill_tok_s": timings["prompt_per_second"],
                  "decode_tok_s": timings["predicted_per_second"]}))
"""


def measure(command: list[str]) -> dict[str, float]:
    """The last line of a command, which is one JSON object."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: figures[key] for key in ("prefill_tok_s", "decode_tok_s")}


def commands(args: argparse.Namespace, model: str, threads: int, seed: int) -> dict[str, list[str]]:
    counts = [str(args.prompt), str(args.generate)]
    ours = [sys.executable, "-m", "voltapile.gateway.cli.main", "bench", "-m", model, "--json"]
    ours += ["-t", str(threads), "-p", counts[0], "-n", counts[1], "-r", "1", "--seed", str(seed)]
    return {
        "voltapile": ours + args.extra.split(),
        "llama.cpp": [args.peer, "-c", PEER, model, str(threads), *counts, str(seed)],
    }


def medians(args: argparse.Namespace, model: str, threads: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {"voltapile": [], "llama.cpp": []}
    for seed in range(args.rounds):
        for engine, command in commands(args, model, threads, seed).items():
            # voltapile bench waits for the machine by itself.
            lock = nullcontext() if engine == "voltapile" else machine_lock()
            with lock:
                runs[engine].append(measure(command))
    return {
        engine: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for engine, figures in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peer", required=True, help="a Python that has xllamacpp")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra", default="", help="more options for voltapile bench")
    args = parser.parse_args()
    print("| model | threads | | voltapile | llama.cpp | ratio |\n|---|---|---|---|---|---|")
    for model in args.models:
        peers = {}
        for threads in map(int, args.threads.split(",")):
            both = medians(args, model, threads)
            peers[threads] = both["llama.cpp"]
            for key, name in (("prefill_tok_s", "prefill"), ("decode_tok_s", "decode")):
                ours, theirs = both["voltapile"][key], both["llama.cpp"][key]
                figures = f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}"
                print(f"| {Path(model).name} | {threads} | {name} | {figures} |", flush=True)
        for key in peers.get(1, {}) if 2 in peers else ():
            scaling = peers[2][key] / peers[1][key]
            verdict = "counts" if scaling >= 1.5 else "does NOT count: the machine was busy"
            print(f"llama.cpp, 2 threads over 1, {key}: {scaling:.2f}; the run {verdict}")


if __name__ == "__main__":
    main()
