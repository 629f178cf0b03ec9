"""Build the extension modules from pyx/: ackcore._native, and ackcore._kafka_native for Kafka.

Environment: ACKCORE_CHECKED=1 checks bounds and the kernel's invariants (pyx/check.h),
ACKCORE_SANITIZE=1 those invariants under ASan and UBSan, ACKCORE_ANNOTATE=1 leaves Cython's
annotated listing beside the generated C.
"""

import os
import sys
from glob import glob

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

CHECKED = os.environ.get("ACKCORE_CHECKED") == "1"
SANITIZE = os.environ.get("ACKCORE_SANITIZE") == "1"
ANNOTATE = os.environ.get("ACKCORE_ANNOTATE") == "1"

# Never -march=native: wheels travel.  Each kernel_*.c names its SIMD level, and one is chosen at
# import.  -g0: many a Python hands on its own -g, which makes a wheel three times as large.
cflags = [] if sys.platform == "win32" else ["-O1"] if CHECKED else ["-O3", "-g0"]
sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
if SANITIZE:
    cflags += ["-g", "-fno-omit-frame-pointer", *sanitizers]

options = {
    "include_dirs": ["pyx", np.get_include()],
    "depends": sorted(glob("pyx/*.h") + glob("pyx/*.pxd")),
    "define_macros": [
        ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
        *([("ACKCORE_CHECKED", "1")] if CHECKED or SANITIZE else []),
    ],
    "extra_compile_args": cflags,
    "extra_link_args": sanitizers if SANITIZE else [],
}
native = Extension(
    "ackcore._native",
    ["pyx/_native.pyx", *sorted(glob("pyx/kernel_*.c"))],
    # Our C is for GCC and Clang.  With another compiler, Windows gets the Python backend, and a
    # warning at import; elsewhere a compile that fails is an install that fails.
    optional=sys.platform == "win32",
    **options,
)
# Without it, ackcore.kafka runs in Python, and warns when it is imported.
kafka = Extension("ackcore._kafka_native", ["pyx/_kafka_native.pyx"], optional=True, **options)

setup(
    ext_modules=cythonize(
        [native, kafka],
        include_path=["pyx"],
        # Generated C stays out of the tree; a checked build differs in its C, so it has a place
        # of its own and neither is taken for the other's.
        build_dir="build/cython-checked" if CHECKED else "build/cython",
        annotate=ANNOTATE,
        compiler_directives={"boundscheck": CHECKED},
    )
)
