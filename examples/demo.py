"""`make demo`: build a bundle from a manifest, serve hits and misses from it, and show how much cold start it saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "dist" / "quickstart-0.1.0"


def main() -> None:
    say("1. The release pipeline: manifest to bundle (compiles five variants; a second run finds them)")
    run("-m", "aotpack", "build", str(ROOT / "manifests" / "quickstart.yaml"), "-o", str(BUNDLE))
    say("2. The server: load the bundle, call it")
    run(str(ROOT / "examples" / "serve_once.py"), str(BUNDLE))
    say("3. Which variant a call would hit, asked without torch")
    shapes = ["--shape", "input_ids=8x100:int64", "--shape", "attention_mask=8x100:int64"]
    run("-m", "aotpack", "explain", str(BUNDLE), "encoder", *shapes)
    say("4. Cold start, process start to first right output, each in a fresh process with caches of its own")
    modes = "bundle-arrays,bundle,eager,compile-copied,compile-cold"
    call = "input_ids=8x100 attention_mask=8x100"
    bench = ["--source", str(ROOT / "manifests"), "--modes", modes, "--call", call, "--samples", "1", "--no-steady"]
    run("-m", "aotpack", "bench", str(BUNDLE), *bench)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
