"""The optional kernels: without a compiler everything installs all the same, and numpy does their work.

What is built is a plain shared library that Python loads with ctypes: it needs no headers of Python and no ABI of it.
Each path is the same source for another instruction set. No path may contract a multiplication and an addition, or
take any other freedom with floats: all give the same bits.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "csrc"
HEADERS = sorted(path.name for path in Path(FOLDER).glob("*.hpp"))
OPTIMIZED = os.environ.get("THINWIRE_OPTIMIZED", "-O3")  # under sanitizers -O3 takes minutes a path, -O1 seconds
DEBUG = "-g" if "THINWIRE_OPTIMIZED" in os.environ else "-g0"  # Python's own flags have -g: 1.7 MB on each device
FLAGS = [
    "-std=c++17", OPTIMIZED, DEBUG, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
    "-Wno-psabi",  # vectors are passed within one file only
]  # fmt: skip
INTEL = {
    "avx2": ["-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mpopcnt"],
    "avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mbmi", "-mbmi2", "-mf16c", "-mpopcnt",
        "-mprefer-vector-width=512",
    ],
}  # fmt: skip
PATHS = {"x86_64": INTEL, "AMD64": INTEL, "aarch64": {"neon": []}, "arm64": {"neon": []}}


class BuildPaths(build_ext):
    """Compiles the source once for each path; one that this compiler does not know is left out."""

    def build_extension(self, ext: Extension) -> None:
        paths = {"scalar": ["-fno-tree-vectorize"], **PATHS.get(platform.machine(), {})}
        for path, flags in paths.items():
            try:
                ext.extra_objects += self.compiler.compile(
                    [f"{FOLDER}/path.cpp"], f"{self.build_temp}/{path}", [("TW_PATH", path)],
                    extra_postargs=[*FLAGS, *flags], depends=ext.depends,
                )  # fmt: skip
            except CompileError:
                if path == "scalar":
                    raise
            else:
                ext.define_macros.append((f"TW_HAS_{path.upper()}", "1"))
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "thinwire.compression.native.kernels",
            [f"{FOLDER}/paths.cpp"],
            depends=[f"{FOLDER}/path.cpp", *(f"{FOLDER}/{name}" for name in HEADERS)],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildPaths},
)
