"""Build and load what gives torch's C++ side CUDA devices: torch looks for it while it is imported, and only then."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


def build() -> Path:
    """Return the library; compile it (2 seconds) where no test before did."""
    root = _find_torch()
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode() + sys.version.encode()).hexdigest()[:16]
    library = SOURCE.parents[2] / "build" / f"simulated_cuda-{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")  # several processes may build it at once
    includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(partial), *includes, *libraries]
    subprocess.run(command, check=True)
    partial.rename(library)
    return library


@cache
def find_library() -> ctypes.CDLL:
    """Return the library that `load` has loaded."""
    return ctypes.CDLL(str(build()))


def _find_torch() -> Path:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def load() -> None:
    """Load the library into this process, which must not have imported torch yet."""
    assert "torch" not in sys.modules, "torch has looked for CUDA already: load this before it"
    with_cuda = _find_torch() / "lib" / "libtorch_cuda.so"
    if with_cuda.exists():  # who registers last is asked: a build with CUDA comes before the simulation
        ctypes.CDLL(str(with_cuda), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
