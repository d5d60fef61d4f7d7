"""Why TensorFlow finds fewer GPUs than there are: the causes, as in a chain.

A GPU needs a driver, the driver's library, CUDA's libraries and a TensorFlow built for
them. What lies behind the first broken link says nothing, so one cause is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cifar10.tools.doctor.facts import INSTALL, ON_CPU, Advice, Facts
from cifar10.tools.doctor.libraries import NEEDED, Library, numbers

# NVIDIA's release notes: the oldest drivers that run CUDA 12, on Linux and for WSL, and
# the one of CUDA 12.5, which compiles the kernels of GPUs without ready ones.
_OLDEST_DRIVER = (525, 60, 13)
_OLDEST_WSL_DRIVER = (528, 33)
_COMPILING_DRIVER = (555,)

# What CUDA's initialization returns, from NVIDIA's documentation of CUresult.
_STATUS = {
    2: ("its memory is taken", "nvidia-smi shows by whom; end these programs."),
    100: (
        "it finds no GPU",
        "Restart the machine. In a container start it with --gpus all.",
    ),
    101: ("a number in CUDA_VISIBLE_DEVICES is not there", "Correct it or unset it."),
    802: (
        "the GPUs are not ready",
        "On a machine with NVSwitch: sudo systemctl start nvidia-fabricmanager.",
    ),
    803: (
        "the driver in the kernel and its library are of different versions",
        "Restart the machine, which loads the driver that was installed last.",
    ),
    804: (
        "a forward-compatibility library of CUDA does not fit this GPU",
        "Remove its folder (cuda-compat) from LD_LIBRARY_PATH.",
    ),
    999: (
        "the driver does not say why",
        "Restart the machine, or make /dev/nvidia-uvm: sudo modprobe nvidia-uvm.",
    ),
}


def why_not_found(facts: Facts) -> Iterator[Advice]:
    """Yields why GPUs are not found; nothing where all are."""
    view = facts.probe.view
    if view is None or facts.machine.system == "Darwin":
        return
    if not facts.gpus:
        yield _none(facts)
    elif len(view.gpus) < facts.gpus:
        advice = next(filter(None, (cause(facts) for cause in _CAUSES)))
        counted = f"TensorFlow finds {len(view.gpus)} of {facts.gpus} NVIDIA GPUs: "
        yield Advice(counted + advice.finding, advice.fix, advice.broken)


def _none(facts: Facts) -> Advice:
    container = (
        " If the host of this container has one: --gpus all, with the NVIDIA Container "
        "Toolkit on the host."
        if facts.machine.container
        else ""
    )
    return Advice(
        "There is no NVIDIA GPU; training runs on the CPU.",
        f"Nothing, if that is right.{container}",
        broken=False,
    )


def _windows(facts: Facts) -> Advice | None:
    if facts.machine.system != "Windows":
        return None
    return Advice(
        "it has used none on Windows itself since its release 2.11.",
        f"Install WSL2 (wsl --install), and in it this project; there {INSTALL}.",
    )


def _hidden(facts: Facts) -> Advice | None:
    if not facts.nvidia.hidden:
        return None
    return Advice(
        f"CUDA_VISIBLE_DEVICES={facts.nvidia.visible_devices!s} hides them.",
        "Unset the variable, if they are to be used.",
        broken=False,
    )


def _without_cuda(facts: Facts) -> Advice | None:
    if facts.probe.view is None or facts.probe.view.cuda:
        return None
    return Advice(
        "it was built without CUDA.",
        f"pip uninstall tensorflow tensorflow-cpu, and then {INSTALL}.",
    )


def _no_driver(facts: Facts) -> Advice | None:
    found = facts.nvidia
    if found.device_files or found.gpus or found.wsl_driver:
        return None
    if facts.machine.container:
        return Advice(
            "this container was not given any of its host's.",
            "Start it with --gpus all (Docker, with the NVIDIA Container Toolkit on "
            "the host) or with a limit nvidia.com/gpu (Kubernetes).",
        )
    if facts.machine.wsl:
        return Advice(
            "Windows does not lend its driver.",
            "Install NVIDIA's driver in Windows, none in WSL, and then wsl --shutdown.",
        )
    return Advice(
        "no driver of NVIDIA is loaded.",
        "Install driver 555 or newer (Ubuntu: sudo ubuntu-drivers install) and restart "
        "the machine. With Secure Boot its module has to be signed; dmesg shows what "
        "keeps it from loading.",
    )


def _other_version(facts: Facts) -> Advice | None:
    if "version mismatch" not in facts.nvidia.smi_error.lower():
        return None
    return Advice(
        f"the driver was updated meanwhile. {_STATUS[803][0]}.", _STATUS[803][1]
    )


def _forbidden(facts: Facts) -> Advice | None:
    files = [path for path, usable in facts.nvidia.device_files.items() if not usable]
    if not files:
        return None
    return Advice(
        f"this user may not use {', '.join(files)}.",
        "Add the user to the file's group (ls -l shows it; often video or render) and "
        "log in again; on a cluster ask its scheduler for a GPU.",
    )


def _driver_library(facts: Facts) -> Advice | None:
    failing = [one for one in _failing(facts) if one.name == NEEDED[0]]
    if not failing:
        return None
    fix = "Install the whole driver, with its libraries for computing."
    if facts.machine.container:
        fix = (
            "Start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES="
            "compute,utility; the NVIDIA Container Toolkit brings the library in."
        )
    elif facts.machine.wsl:
        fix = "Put /usr/lib/wsl/lib into LD_LIBRARY_PATH, or update Windows' driver."
    return Advice(f"the driver's library cannot be loaded: {failing[0].error}.", fix)


def _old_driver(facts: Facts) -> Advice | None:
    version = numbers(facts.nvidia.driver)
    if not version:
        return None
    oldest = _OLDEST_WSL_DRIVER if facts.machine.wsl else _OLDEST_DRIVER
    if version >= oldest:
        return None
    wanted = ".".join(map(str, oldest))
    where = "in Windows" if facts.machine.wsl else "and restart the machine"
    return Advice(
        f"the driver {facts.nvidia.driver} is older than {wanted}, and CUDA 12 needs "
        "that.",
        f"Install driver {_COMPILING_DRIVER[0]} or newer {where}.",
    )


def _not_initialized(facts: Facts) -> Advice | None:
    status = facts.libraries.driver_status
    if not status:
        return None
    meaning, fix = _STATUS.get(
        status,
        ("NVIDIA's documentation of CUresult explains it", "Restart the machine."),
    )
    return Advice(f"CUDA does not start, error {status}: {meaning}.", fix)


def _libraries(facts: Facts) -> Advice | None:
    failing = _failing(facts)
    if not failing:
        return None
    said = "; ".join(f"{one.name} ({one.error})" for one in failing)
    if shadowed := [one for one in failing if one in facts.libraries.shadowed]:
        return shadow(shadowed, f"{said} cannot be loaded.")
    fix = f"{INSTALL} brings all of them"
    if any(one.in_wheel for one in failing):
        fix = f"Install them anew: {INSTALL} --force-reinstall"
    return Advice(
        f"the libraries that it opens by name cannot all be loaded: {said}.",
        f"{fix}, or in this project's folder: pip install -e '.[gpu]'. A CUDA 13 of "
        "the system does not help: its libraries have other names.",
    )


def _outdated(facts: Facts) -> Advice | None:
    if not facts.libraries.outdated:
        return None
    return Advice(
        f"wheels are older than it wants: {'; '.join(facts.libraries.outdated)}.",
        f"{INSTALL}. If another package, as PyTorch, wants the old ones, give it an "
        "environment of its own.",
    )


def _shadowing(facts: Facts) -> Advice | None:
    shadowed = facts.libraries.shadowed
    return shadow(shadowed, "") if shadowed else None


def _too_old(facts: Facts) -> Advice | None:
    oldest = min(facts.built_for, default=(0, 0))
    old = [
        f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})"
        for gpu in facts.nvidia.gpus
        if gpu.capability and gpu.capability < oldest
    ]
    if not old:
        return None
    return Advice(
        f"it was built for compute capability {oldest[0]}.{oldest[1]} and newer, and "
        f"there is {', '.join(old)}.",
        f"Use a newer GPU. {ON_CPU}.",
    )


def _chosen(facts: Facts) -> Advice | None:
    if facts.nvidia.visible_devices is None:
        return None
    return Advice(
        f"CUDA_VISIBLE_DEVICES={facts.nvidia.visible_devices} lets it use no others.",
        "Unset the variable, or name more of them. Numbers begin with 0, and all after "
        "one that does not exist are ignored.",
        broken=False,
    )


def _unknown(facts: Facts) -> Advice | None:
    said = facts.probe.messages[-1:] or ("nothing about it",)
    return Advice(
        f"it is not known why. TensorFlow says: {said[0]}.",
        "TF_CPP_MIN_LOG_LEVEL=0 before a command shows more; TF_CPP_MAX_VLOG_LEVEL=3 "
        "every file that it opens.",
    )


_CAUSES: tuple[Callable[[Facts], Advice | None], ...] = (
    _windows,
    _hidden,
    _without_cuda,
    _no_driver,
    _other_version,
    _forbidden,
    _driver_library,
    _old_driver,
    _not_initialized,
    _libraries,
    _outdated,
    _too_old,
    _chosen,
    _shadowing,
    _unknown,
)


def _failing(facts: Facts) -> list[Library]:
    return [one for one in facts.libraries.found if one.name in NEEDED and one.error]


def shadow(shadowed: Sequence[Library], failure: str) -> Advice:
    """Returns the advice on libraries that LD_LIBRARY_PATH puts before the right ones.

    Args:
        shadowed: What it puts there.
        failure: What goes wrong.
    """
    paths = ", ".join(one.path for one in shadowed)
    return Advice(
        f"{failure} LD_LIBRARY_PATH puts other files before the wheels that fit: "
        f"{paths}.".strip(),
        "Take these folders out of LD_LIBRARY_PATH, or unset it.",
    )
