"""Builds the compiled kernels, where there is a C++ compiler; everything else is in pyproject.toml.

A library per instruction set, loaded by `jaxrec.kernels.embedding_bag.library`. They are built against the headers of
the jaxlib that is installed beside setuptools; where that or the compiler is missing, the package is installed without
them, and runs say that they use XLA's own operations.
"""

import os
import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = "jaxrec/kernels/embedding_bag/cpu"
# Products are rounded before they are added, so that results are the same for all instruction sets.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
LEVELS = {"baseline": []}
if platform.machine() == "x86_64":
    avx2 = ["-mavx2", "-mfma", "-mf16c", "-mprfchw"]
    wide = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mprefer-vector-width=512"]
    LEVELS |= {"avx2": avx2, "avx512": avx2 + wide}
# Which of them; all where it is not set.
chosen = os.environ.get("JAXREC_KERNEL_LEVELS", ",".join(LEVELS)).split(",")


class BuildKernels(build_ext):
    """build_ext against jaxlib's headers."""

    def build_extension(self, ext: Extension) -> None:
        try:
            from jax.ffi import include_dir
        except ImportError as e:
            raise CompileError(f"jaxlib's headers are needed to compile {ext.name}: {e}") from e
        ext.extra_compile_args += ["-isystem", include_dir()]  # Whose warnings are not ours.
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            f"jaxrec.kernels.embedding_bag._cpu_{level}",
            sources=[f"{FOLDER}/core.cc", f"{FOLDER}/ffi.cc"],
            depends=[f"{FOLDER}/core.h", f"{FOLDER}/numbers.h", f"{FOLDER}/work.h"],
            extra_compile_args=FLAGS + extra,
            language="c++",
            optional=True,
        )
        for level, extra in LEVELS.items()
        if level in chosen
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
