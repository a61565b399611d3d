"""Builds the Cython extensions. Everything declarative is in pyproject.toml.

Environment:
    KVNIXL_SANITIZE=1       build with ASan and UBSan (make test-asan)
    KVNIXL_NO_OPTIMIZE=1    build with -O0 for a debugger
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SANITIZE = os.environ.get("KVNIXL_SANITIZE", "") not in ("", "0")
NO_OPTIMIZE = os.environ.get("KVNIXL_NO_OPTIMIZE", "") not in ("", "0")

compile_args = ["-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fno-strict-aliasing"]
link_args: list[str] = []
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*flags, "-O1", "-g", "-fno-omit-frame-pointer"]
    link_args += flags
elif NO_OPTIMIZE:
    compile_args += ["-O0", "-g"]
else:
    compile_args += ["-O3"]

headers = sorted(str(path) for path in Path("csrc").glob("*.h"))

extensions = [
    Extension(
        f"kvnixl.{path.stem}",
        [str(path)],
        include_dirs=["csrc"],
        depends=headers,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    for path in sorted(Path("kvnixl").glob("_*.pyx"))
]

if not extensions:
    raise SystemExit("there is no kvnixl/_*.pyx here: this source tree is not complete")

setup(
    ext_modules=cythonize(
        extensions,
        compiler_directives={
            "language_level": "3",
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "embedsignature": True,
            "embedsignature.format": "python",
            "autotestdict": False,
        },
        build_dir="build/cython",
        force=SANITIZE,
    )
)
