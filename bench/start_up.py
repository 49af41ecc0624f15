"""From weights on disk to the first token: how long an engine takes to start, by part.

Saves a model of random weights once, then starts it in fresh processes: "cold" with an empty
folder for what Triton compiles, "warm" with the one that the first left behind. The files of the
model have just been written, so they are read from the page cache, as after any recent use.

    python bench/start_up.py --out bench/results/start_up.json
    python bench/start_up.py --shape tiny --device cpu
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from made import SHAPES, made_model

from specdec.bench.environment import describe
from specdec.verifier.loading import save_model

TARGET_SECONDS = 20.0

CHILD = """
import json, sys, time
started = time.perf_counter()
import specdec
from specdec import build, sources
imported = time.perf_counter()
seconds = {"import": imported - started}
load = build.load_source
def timed_load(*args):
    first = time.perf_counter()
    model = load(*args)
    if args[-1].type == "cuda":
        import torch
        torch.cuda.synchronize()
    seconds["weights"] = time.perf_counter() - first
    return model
build.load_source = timed_load
folder, device, draft = sys.argv[1:4]
engine = specdec.Engine(folder, draft, 4, device=device, max_num_seqs=64)
ready = time.perf_counter()
params = specdec.SamplingParams(max_new_tokens=1, ignore_eos=True)
engine.generate([list(range(10, 40))], params)
done = time.perf_counter()
seconds |= {"graphs and warm-up": engine.capture_seconds, "engine": ready - imported}
seconds |= {"first token": done - ready, "all": done - started}
print(json.dumps(seconds))
"""


def start(folder: Path, device: str, cache: Path) -> dict[str, float]:
    """Seconds by part of a process of its own, which ends with its first token."""
    env = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", CHILD, str(folder), device, "ngram"]
    began = time.perf_counter()
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    seconds["process"] = time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment = describe(torch.device(args.device))
    with tempfile.TemporaryDirectory() as root:
        folder = save_model(made_model(args.shape, args.device), Path(root) / "model")
        size = sum(file.stat().st_size for file in folder.iterdir())
        runs = {
            name: start(folder, args.device, Path(root) / "triton") for name in ("cold", "warm")
        }
    for name, seconds in runs.items():
        print(name, ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items()))
    result = {
        "benchmark": "start_up",
        "environment": environment,
        "shape": args.shape,
        "bytes": size,
        "target_seconds_warm": TARGET_SECONDS,
        "seconds": runs,
    }
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
