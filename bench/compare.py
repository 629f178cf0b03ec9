"""Two commits, interleaved: ``python -m bench.compare BASE [OTHER]``; OTHER is the working tree.

With ``--cpu avx2,avx512`` BASE runs its AVX2 kernel and OTHER, which may be the same commit, its
AVX-512 one.

Each is built in a folder of its own under build/compare; the benches are those of this tree.
Every round runs the one and then the other, in processes that stay, and a ratio is taken within it.
More than 1: OTHER is faster. A difference within the spread is none.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.streams import CALL
from bench.workers import ROOT, Worker

BUILD = ROOT / "build" / "compare"
PARTS = ("ackcore", "pyx", "setup.py", "pyproject.toml", "README.md", "LICENSE")
ROWS = 64 * CALL


def git(*arguments: str) -> bytes:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def built(commit: str | None) -> Path:
    """A folder with that commit, or the working tree, compiled."""
    if commit is None:
        folder = BUILD / "tree"
        shutil.rmtree(folder, ignore_errors=True)
        for name in git("ls-files", "-z", *PARTS).decode().split("\0")[:-1]:
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
    else:
        sha = git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        folder = BUILD / sha[:12]
        if (folder / "built").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(git("archive", sha, *PARTS))) as archive:
            archive.extractall(folder, filter="data")
    print(f"building {commit or 'the working tree'} in {folder}", file=sys.stderr)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"{folder} does not build:\n{made.stderr[-2000:]}")
    (folder / "built").touch()
    return folder


def jobs(rounds: int, large: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared: a job of jobs.py and its arguments, by the name it is printed under."""
    sizes = [1_000, 100_000, 1_000_000] + [10_000_000] * large
    turns: dict[str, Any] = {"rows": ROWS, "turns": rounds}
    compared = {
        f"apply by 8192, {n:,} in flight": ("apply_rows", {"in_flight": n, **turns}) for n in sizes
    }
    for size in (10, 100, 1_000):
        arguments = {"in_flight": 100_000, "size": size, **turns}
        compared[f"apply by {size:,}, 100,000 in flight"] = ("apply_rows", arguments)
    arguments = {"in_flight": 100_000, "whole": True, **turns}
    compared["whole trees back to back, 100,000 in flight"] = ("apply_rows", arguments)
    compared["ack(), 10,000 live roots"] = ("ack_one_by_one", {"roots": 10_000})
    compared["merge and settle, 1,000,000 roots"] = ("merge_and_settle", {"roots": 1_000_000})
    return compared


def two_levels(order: str) -> tuple[str, str]:
    """The SIMD levels of the two sides."""
    base, _, other = order.partition(",")
    known = ("baseline", "avx2", "avx512")
    if base not in known or other not in known:
        raise argparse.ArgumentTypeError(
            f"must be two of {', '.join(known)} with a comma between them, got {order!r}"
        )
    return base, other


def main() -> None:
    """Build both, run them in turn, print medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("other", nargs="?", help="another; the working tree by default")
    parser.add_argument("-k", default="", help="only what has this in its name")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large", action="store_true", help="also 10,000,000 in flight")
    parser.add_argument(
        "--cpu",
        type=two_levels,
        metavar="LEVEL,LEVEL",
        help="SIMD levels (ACKCORE_CPU) of the two sides; by default the best that runs here",
    )
    options = parser.parse_args()
    homes = {"base": built(options.base), "other": built(options.other)}
    names = [options.base, options.other or "working tree"]
    environments: dict[str, dict[str, str]] = {side: {} for side in homes}
    if options.cpu:
        names = [f"{name} ({level})" for name, level in zip(names, options.cpu, strict=True)]
        for side, level in zip(homes, options.cpu, strict=True):
            environments[side]["ACKCORE_CPU"] = level
    print(f"{' / '.join(names)}: above 1, the second is faster")
    for name, (job, arguments) in jobs(options.rounds, options.large).items():
        if options.k not in name:
            continue
        seconds: dict[str, list[float]] = {side: [] for side in homes}
        with ExitStack() as stack:
            workers = {
                side: stack.enter_context(
                    Worker(job, home=home, environment=environments[side], **arguments)
                )
                for side, home in homes.items()
            }
            for _ in range(options.rounds):
                for side, worker in workers.items():
                    seconds[side].append(worker.turn()[2])
        ratios = [a / b for a, b in zip(seconds["base"], seconds["other"], strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:<44} {statistics.median(ratios):6.3f} x   quartiles {low:.3f} .. {high:.3f}   "
            f"all {min(ratios):.3f} .. {max(ratios):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
