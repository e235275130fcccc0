"""`make fuzz`: 100 000 hostile frames a decoder, on every path, with kernels that stop at the first wrong access.

The kernels are built apart, under the address and undefined-behaviour sanitizers (tests/compression/sanitized.sh); a
frame that one of them reads past, or that overflows a number, ends the run with its report. Leaks are not looked for:
no kernel allocates (a test says so), and the interpreter itself never frees all it has.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

from tests.support.codec_examples import SPECS
from tests.support.hostile_frames import bombs, refused, target
from tests.support.hostile_lanes import LANES, LATTICE, fuzz_lanes, fuzz_lattice
from tests.support.hostile_streams import LONG_STREAMS, SHORT, fuzz_streams
from tests.support.phase_messages import MESSAGES, fuzz_messages
from thinwire.compression import native

SIZES = (300, 300, 300, 300, 300, 300, 1, 64, 2000, 5000)  # of the vector: most are small, since that is quick
SEED = 20_261_121
MAX_KIB = 64 << 10  # that a process may grow by while it fuzzes: no frame gets what it says it needs


class Broken(AssertionError):
    """A decoder did what none may; the text says with which frame it does so again."""


def fuzz(spec: str, frames: int, seed: int = SEED) -> int:
    """How many of so many hostile frames were refused; Broken where a decoder is not as it must be.

    Each goes through numpy and one path with kernels, which take turns: both refuse it, or decode it to the same bits.
    """
    if spec == LANES:
        return fuzz_lanes(frames, seed)
    if spec == LATTICE:
        return fuzz_lattice(frames, seed)
    if spec == MESSAGES:
        return fuzz_messages(frames, seed)
    if spec == LONG_STREAMS:
        return fuzz_streams(frames, seed)
    rng, found = random.Random(zlib.crc32(spec.encode()) ^ seed), 0
    *kernels, oracle = native.available()
    for number in range(frames):
        to = target(spec, SIZES[number % len(SIZES)])
        payload, n = to.hostile(rng), to.codec.layout.size
        start = rng.randrange(n + 1)
        stop = rng.randrange(start, n + 1)
        results = []
        for path in (*kernels[number % len(kernels) :][:1], oracle) if kernels else (oracle,):
            with native.using(path):
                try:
                    results.append(refused(to.codec, payload, start, stop))
                except Exception as error:
                    shown = payload.hex() if len(payload) < 4000 else f"{payload[:64].hex()}.. ({len(payload)} bytes)"
                    raise Broken(
                        f"{spec} of {n} on {path}, frame {number} of seed {seed}: {error!r}\n{shown}"
                    ) from error
        if any(result != results[0] for result in results):
            raise Broken(f"{spec} of {n}, frame {number} of seed {seed}: paths differ\n{payload.hex()[:4000]}")
        found += results[0] is None
    return found


def one(spec: str, frames: int, seed: int) -> int:
    """The decoder of one spec, in this process; 0 where it stood."""
    warnings.simplefilter("error")
    bombs()
    fuzz(spec, min(frames, 500), seed + 1)  # what a decoder always needs is taken now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fuzz(spec, frames, seed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{spec}: {found} refused, {frames - found} legal, {grown} KiB more{' TOO MUCH' * (grown > MAX_KIB)}")
    return grown > MAX_KIB


def apart(spec: str, frames: int, seed: int) -> bool:
    """The same in a process of its own, which a kernel may end; whether it stood."""
    frames = max(1, frames // SHORT) if spec == LONG_STREAMS else frames
    command = [sys.executable, "-m", "tests.compression.fuzz", "--one", spec, "--frames", str(frames)]
    done = subprocess.run([*command, "--seed", str(seed)], capture_output=True, text=True, check=False)
    said = done.stdout if done.returncode == 0 else f"BROKEN {spec}\n{done.stdout}{done.stderr}\n"
    print(said, end="", flush=True)
    return done.returncode == 0


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, prog="python -m tests.compression.fuzz")
    read.add_argument("--frames", type=int, default=100_000, help="a decoder")
    read.add_argument("--seed", type=int, default=SEED)
    read.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    read.add_argument("--only", default="", help="decoders whose spec holds this")
    read.add_argument("--one", help=argparse.SUPPRESS)
    options = read.parse_args()
    if options.one:
        return one(options.one, options.frames, options.seed)
    specs, began = (
        [spec for spec in (*SPECS, LANES, LATTICE, MESSAGES, LONG_STREAMS) if options.only in spec],
        time.monotonic(),
    )
    print(f"{len(specs)} decoders, {options.frames} frames each, on {', '.join(native.available())}", flush=True)
    with ThreadPoolExecutor(options.workers) as pool:
        stood = sum(pool.map(lambda spec: apart(spec, options.frames, options.seed), specs))
    print(f"{stood} decoders stood, {len(specs) - stood} did not, in {time.monotonic() - began:.0f} s")
    return stood < len(specs)


if __name__ == "__main__":
    raise SystemExit(main())
