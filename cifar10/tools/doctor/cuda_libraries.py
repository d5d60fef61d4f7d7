"""The CUDA libraries that TensorFlow opens by name: where they are, and which fail.

TensorFlow says "Cannot dlopen some GPU libraries" and not which. It looks in
LD_LIBRARY_PATH, then beside itself where pip puts NVIDIA's wheels, then where the
system has its libraries. It takes the first file of the right name, even if that one
fails and a later one would work.
"""

import ctypes
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

from cifar10.tools import child_process

DRIVER = "libcuda.so.1"
CUDNN = "libcudnn.so.9"
NCCL = "libnccl.so.2"

# What TensorFlow 2.21 opens, in its order, and the folder of NVIDIA's wheel. It uses no
# GPU if one of `NEEDED` is missing.
_WHEEL_FOLDERS = {
    DRIVER: "",
    "libcudart.so.12": "cuda_runtime",
    "libcublas.so.12": "cublas",
    "libcublasLt.so.12": "cublas",
    "libcufft.so.11": "cufft",
    "libcusolver.so.11": "cusolver",
    "libcusparse.so.12": "cusparse",
    CUDNN: "cudnn",
    "libcupti.so.12": "cuda_cupti",
    NCCL: "nccl",
    "libnvrtc.so.12": "cuda_nvrtc",
    "libnvJitLink.so.12": "nvjitlink",
}
NEEDED = tuple(_WHEEL_FOLDERS)[:8]


@dataclasses.dataclass(frozen=True)
class Library:
    """A library, and what the driver's and cuDNN say of themselves."""

    name: str  # Under which TensorFlow opens it.
    place: str  # `LD_LIBRARY_PATH`, `wheel` or `system`.
    path: str  # The name alone where the system's loader looks for it.
    in_wheel: bool = False  # Whether an installed wheel has it, whatever the place.
    error: str = ""  # Why it cannot be loaded.
    version: str = ""  # Of cuDNN; of the driver the newest CUDA that it runs.
    status: int = 0  # What CUDA's initialization returned, 0 for success.

    @property
    def shadows_wheel(self) -> bool:
        """Whether LD_LIBRARY_PATH puts it before the wheel's."""
        return self.place == "LD_LIBRARY_PATH" and self.in_wheel


def examine() -> tuple[Library, ...]:
    """Loads each library in a child process, from where TensorFlow would."""
    libraries = [_locate(name, folder) for name, folder in _WHEEL_FOLDERS.items()]
    output = child_process.run(
        __name__, *(library.path for library in libraries), seconds=60
    )
    loaded = dict(output.messages)
    not_loaded = {"error": output.error}
    return tuple(
        dataclasses.replace(library, **loaded.get(library.path, not_loaded))
        for library in libraries
    )


def _locate(name: str, folder: str) -> Library:
    spec = importlib.util.find_spec("tensorflow")
    packages = Path(spec.origin).parents[1] if spec and spec.origin else Path()
    wheel = packages / "nvidia" / folder / "lib" / name
    in_wheel = wheel.exists()
    for directory in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        path = Path(directory) / name
        if not directory or not path.exists():
            continue
        if not (in_wheel and path.samefile(wheel)):
            return Library(name, "LD_LIBRARY_PATH", str(path), in_wheel)
    if in_wheel:
        return Library(name, "wheel", str(wheel), in_wheel)
    return Library(name, "system", name)


def main() -> None:
    """Loads the libraries that the command line names, and prints what happened."""
    stdout = child_process.claim_stdout()
    for path in sys.argv[1:]:
        found: dict[str, str | int] = {}
        try:
            library = ctypes.CDLL(path)
            if Path(path).name == DRIVER:
                version = ctypes.c_int()
                library.cuDriverGetVersion(ctypes.byref(version))
                major, minor = divmod(version.value, 1000)
                found["version"] = f"{major}.{minor // 10}"
                found["status"] = library.cuInit(0)
            if Path(path).name == CUDNN:
                major, minor = divmod(library.cudnnGetVersion(), 10_000)
                found["version"] = f"{major}.{minor // 100}"
        except OSError as error:
            found["error"] = str(error)
        print(json.dumps([path, found]), file=stdout, flush=True)
