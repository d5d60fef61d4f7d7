"""The CUDA libraries that TensorFlow opens by name: where they are, which one fails.

TensorFlow says "Cannot dlopen some GPU libraries" and not which. It looks in
LD_LIBRARY_PATH, then beside itself where pip puts NVIDIA's wheels, then where the
system has its libraries; the first file found is taken, even if another would work.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from cifar10.tools.doctor import child

DRIVER = "libcuda.so.1"

# What TensorFlow 2.21 opens, in its order, and the folder of the wheel. It registers no
# GPU if one of `NEEDED` is missing.
_WHEEL_FOLDERS = {
    DRIVER: "",
    "libcudart.so.12": "cuda_runtime",
    "libcublas.so.12": "cublas",
    "libcublasLt.so.12": "cublas",
    "libcufft.so.11": "cufft",
    "libcusolver.so.11": "cusolver",
    "libcusparse.so.12": "cusparse",
    "libcudnn.so.9": "cudnn",
    "libcupti.so.12": "cuda_cupti",
    "libnccl.so.2": "nccl",
    "libnvrtc.so.12": "cuda_nvrtc",
    "libnvJitLink.so.12": "nvjitlink",
}
NEEDED = tuple(_WHEEL_FOLDERS)[:8]

_SECONDS = 60.0

# The functions that tell a library's version.
_VERSIONS = {
    DRIVER: "cuDriverGetVersion",
    "libcudart.so.12": "cudaRuntimeGetVersion",
    "libcudnn.so.9": "cudnnGetVersion",
}


@dataclasses.dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        name: As TensorFlow opens it.
        place: `LD_LIBRARY_PATH`, `wheel` or `system`.
        path: The file that is taken; the name alone where the system's loader looks.
        error: Why it cannot be loaded; empty if it can.
        version: Its version, where it tells one.
        in_wheel: Whether the wheel has it, taken or not.
    """

    name: str
    place: str
    path: str
    error: str = ""
    version: str = ""
    in_wheel: bool = False


@dataclasses.dataclass(frozen=True)
class Libraries:
    """All of them.

    Attributes:
        found: The libraries, in the order in which TensorFlow opens them.
        driver_status: What CUDA's initialization returned, 0 for success; None if the
            driver's library could not be asked.
        wheels: Installed version by name, of the wheels that TensorFlow wants; empty
            for a missing one.
        outdated: `name version, at least wanted`, of wheels older than it wants.
    """

    found: tuple[Library, ...] = ()
    driver_status: int | None = None
    wheels: dict[str, str] = dataclasses.field(default_factory=dict)
    outdated: tuple[str, ...] = ()

    @property
    def shadowed(self) -> tuple[Library, ...]:
        """Those that LD_LIBRARY_PATH puts before the wheel's."""
        return tuple(
            one for one in self.found if one.place == "LD_LIBRARY_PATH" and one.in_wheel
        )


def look(
    environ: Mapping[str, str] = os.environ,
    packages: Path | None = None,
    seconds: float = _SECONDS,
) -> Libraries:
    """Loads each library in another process, in the place where TensorFlow finds it.

    Args:
        environ: Environment variables.
        packages: The folder of TensorFlow's package and of NVIDIA's; None to look.
        seconds: How long loading may take.
    """
    packages = packages or _packages()
    libraries = [
        _locate(name, folder, environ, packages)
        for name, folder in _WHEEL_FOLDERS.items()
    ]
    answers, failure = _load([library.path for library in libraries], seconds)
    silent = {"error": failure or "not tried"}
    found = tuple(
        dataclasses.replace(
            library,
            error=(answer := answers.get(library.path, silent)).get("error", ""),
            version=answer.get("version", ""),
        )
        for library in libraries
    )
    wheels, outdated = _wheels()
    status = answers.get(libraries[0].path, {}).get("status")
    return Libraries(found, int(status) if status else None, wheels, outdated)


def _packages() -> Path | None:
    spec = importlib.util.find_spec("tensorflow")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def _locate(
    name: str, folder: str, environ: Mapping[str, str], packages: Path | None
) -> Library:
    """Returns the file that TensorFlow takes."""
    wheel = packages / "nvidia" / folder / "lib" / name if packages and folder else None
    in_wheel = wheel is not None and wheel.exists()
    for directory in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if not directory or not (path := Path(directory) / name).exists():
            continue
        if not (in_wheel and wheel and path.samefile(wheel)):
            return Library(name, "LD_LIBRARY_PATH", str(path), in_wheel=in_wheel)
    if in_wheel:
        return Library(name, "wheel", str(wheel), in_wheel=True)
    return Library(name, "system", name)


def _wheels() -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the installed versions of the wheels, and which are too old."""
    wheels, outdated = {}, []
    try:
        requirements = metadata.requires("tensorflow") or []
    except metadata.PackageNotFoundError:
        return {}, ()
    for requirement in requirements:
        name = re.match(r"nvidia-[\w-]+", requirement)
        if not name:
            continue
        try:
            version = metadata.version(name.group())
        except metadata.PackageNotFoundError:
            version = ""
        wheels[name.group()] = version
        least = re.search(r">=([\d.]+)", requirement)
        if version and least and numbers(version) < numbers(least.group(1)):
            outdated.append(f"{name.group()} {version}, at least {least.group(1)}")
    return wheels, tuple(outdated)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare it."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _load(paths: list[str], seconds: float) -> tuple[dict[str, dict[str, str]], str]:
    """Returns what the child said of each file, and why it said nothing of others."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = child.start(__name__, *paths, stderr=stderr)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.end(process)
            return {}, f"loading did not end within {seconds:g} s"
        stderr.seek(0)
        failure = (
            child.last_words(process.returncode, stderr.read())
            if process.returncode
            else ""
        )
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {answer.pop("path"): answer for answer in answers}, failure


def main() -> None:
    """Loads the libraries that the command line names, in a process of its own."""
    for path in sys.argv[1:]:
        answer = {"path": path}
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            answer["error"] = str(error)
        else:
            answer["version"] = _version(library, Path(path).name)
            if Path(path).name == DRIVER:
                answer["status"] = str(library.cuInit(0))
        print(json.dumps(answer), flush=True)


def _version(library: ctypes.CDLL, name: str) -> str:
    """Returns the version that a library tells, as in 12.5 or 9.3.0."""
    function = _VERSIONS.get(name)
    if not function or not hasattr(library, function):
        return ""
    if name.startswith("libcudnn"):
        library.cudnnGetVersion.restype = ctypes.c_size_t
        number = library.cudnnGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    number = ctypes.c_int()
    getattr(library, function)(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
