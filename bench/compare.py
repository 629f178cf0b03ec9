"""Two commits, interleaved: ``python -m bench.compare BASE [OTHER]``; OTHER is the working tree.

With ``--cpu avx2,avx512`` BASE runs its AVX2 kernel and OTHER, which may be the same commit, its
AVX-512 one.

With ``--spark`` topologies are compared, by the wall clock and by the CPU time of driver, JVM and
workers together, in place of ledgers.

Each is built in a folder of its own under build/compare; the benches are those of this tree.
Every round runs both, in processes that stay, in turn A B, B A, and a ratio is taken within it.
More than 1: OTHER is faster. A difference within the spread is none: from six rounds on it is told
within what the median is, in 95 of 100 such contests, and that must be on one side of 1.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.conftest import Ratio
from bench.streams import CALL
from bench.workers import ROOT, Worker

BUILD = ROOT / "build" / "compare"
PARTS = ("ackcore", "pyx", "setup.py", "pyproject.toml", "README.md", "LICENSE")
ROWS = 64 * CALL


def git(*arguments: str) -> bytes:
    """Return the output of a git command."""
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
    """One comparison: its printed name, a job of jobs.py, and the job's arguments."""
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
    arguments = {"in_flight": 100_000, **turns}
    compared["Acker.apply with callbacks, 100,000 in flight"] = ("apply_by_acker", arguments)
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


def compare_ledgers(
    homes: Mapping[str, Path], environments: Mapping[str, dict[str, str]], options: Any
) -> None:
    """Each job in two processes of its own."""
    for name, (job, arguments) in jobs(options.rounds, options.large).items():
        if options.k not in name:
            continue
        with ExitStack() as stack:
            workers = {
                side: stack.enter_context(
                    Worker(job, home=home, environment=environments[side], **arguments)
                )
                for side, home in homes.items()
            }
            print_ratios(name, in_turn(workers, options.rounds, lambda span: {"": span[2]}))


def compare_on_spark(
    homes: Mapping[str, Path], environments: Mapping[str, dict[str, str]], options: Any
) -> None:
    """All jobs in the same two processes: a session of Spark takes long to start."""
    from bench.topology_jobs import COMPARED, write_data  # noqa: PLC0415 - needs pyspark

    with tempfile.TemporaryDirectory() as data, ExitStack() as stack:
        lines, events, small = (10**5, 10**5, 6) if options.quick else (2_000_000, 5_000_000, 12)
        write_data(Path(data), lines, small, events)
        memory = {"PYSPARK_SUBMIT_ARGS": "--driver-memory 4g pyspark-shell"}
        workers = {
            side: stack.enter_context(
                Worker(
                    "topology_jobs.OnSpark",
                    home=home,
                    environment={**environments[side], **memory},
                    data=data,
                )
            )
            for side, home in homes.items()
        }
        for name, work in COMPARED.items():
            if options.k in name:
                in_turn(workers, 1, dict, work)  # the JVM compiles what is used
                print_ratios(name, in_turn(workers, options.rounds, dict, work))


def in_turn(
    workers: Mapping[str, Worker],
    rounds: int,
    seconds: Callable[[Any], dict[str, float]],
    *arguments: object,
) -> list[dict[str, dict[str, float]]]:
    """By round and side the seconds of a turn, by kind: A B, then B A, and so on."""
    taken = []
    for number in range(rounds):
        sides = list(workers)[:: -1 if number % 2 else 1]
        taken.append({side: seconds(workers[side].turn(*arguments)) for side in sides})
    return taken


def print_ratios(name: str, taken: list[dict[str, dict[str, float]]]) -> None:
    """A line for each kind of seconds."""
    for kind in taken[0]["base"]:
        seconds = {side: [each[side][kind] for each in taken] for side in taken[0]}
        ratios = [a / b for a, b in zip(seconds["base"], seconds["other"], strict=True)]
        line = f"{f'{name} {kind}'.strip():<46} {statistics.median(ratios):6.3f} x"
        if len(ratios) > 1:
            low, *_, high = statistics.quantiles(ratios, n=4)
            line += f"   quartiles {low:.3f} .. {high:.3f}"
        line += f"   all {min(ratios):.3f} .. {max(ratios):.3f}"
        if ends := Ratio(name, tuple(ratios), None, False, "x").interval():
            line += f"   median within {ends[0]:.3f} .. {ends[1]:.3f}"
        medians = " / ".join(f"{statistics.median(each):.2f}" for each in seconds.values())
        print(f"{line}   {medians} s" if kind else line, flush=True)


def main() -> None:
    """Build both, run them in turn, print medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("other", nargs="?", help="another; the working tree by default")
    parser.add_argument("-k", default="", help="only what has this in its name")
    parser.add_argument("--rounds", type=int, help="15; with --spark 10")
    parser.add_argument("--spark", action="store_true", help="topologies in place of ledgers")
    parser.add_argument("--quick", action="store_true", help="with --spark: small, does it run?")
    parser.add_argument("--large", action="store_true", help="also 10,000,000 in flight")
    parser.add_argument(
        "--cpu",
        type=two_levels,
        metavar="LEVEL,LEVEL",
        help="SIMD levels (ACKCORE_CPU) of the two sides; by default the best that runs here",
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (10 if options.spark else 15)
    homes = {"base": built(options.base), "other": built(options.other)}
    names = [options.base, options.other or "working tree"]
    environments: dict[str, dict[str, str]] = {side: {} for side in homes}
    if options.cpu:
        names = [f"{name} ({level})" for name, level in zip(names, options.cpu, strict=True)]
        for side, level in zip(homes, options.cpu, strict=True):
            environments[side]["ACKCORE_CPU"] = level
    print(f"{' / '.join(names)}: above 1, the second is faster", flush=True)
    compare = compare_on_spark if options.spark else compare_ledgers
    compare(homes, environments, options)


if __name__ == "__main__":
    main()
