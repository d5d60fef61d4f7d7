"""Why TensorFlow finds fewer GPUs than there are.

A GPU needs a driver, CUDA's libraries and a TensorFlow built for it. Failures after the
first broken link say nothing, so only the first cause is given.
"""

from collections.abc import Iterator

from cifar10.tools.doctor.cuda_libraries import DRIVER, NEEDED
from cifar10.tools.doctor.facts import (
    DRIVER_555,
    UNSET_LIBRARY_PATH,
    Advice,
    Facts,
    numbers,
)
from cifar10.tools.doctor.machine import Machine

# What CUDA's initialization returns, from NVIDIA's documentation of CUresult.
_STATUS = {
    100: ("no GPU is found", "Unset CUDA_VISIBLE_DEVICES, or restart the machine."),
    802: ("the GPUs are not ready", "sudo systemctl start nvidia-fabricmanager."),
    803: ("the driver's module and library differ", "Restart the machine."),
    804: ("cuda-compat does not fit this GPU", "Remove it from LD_LIBRARY_PATH."),
    999: ("no reason is given", "sudo modprobe nvidia-uvm, or restart the machine."),
}


def advise(facts: Facts) -> Iterator[Advice]:
    """Yields why GPUs are missing; nothing if TensorFlow finds all of them."""
    found = len(facts.probe.gpus)
    if facts.probe.error:
        return
    if not facts.gpus:
        fix = "None is needed."
        if facts.machine.container or facts.machine.wsl:
            fix += f" If the host has a GPU: {_install_driver(facts.machine)}"
        finding = "There is no NVIDIA GPU; training runs on the CPU."
        yield Advice(finding, fix, broken=False)
    elif found < facts.gpus:
        cause = next(_causes(facts))
        finding = f"TensorFlow finds {found} of {facts.gpus} NVIDIA GPUs: "
        yield Advice(finding + cause.finding, cause.fix, cause.broken)


def _causes(facts: Facts) -> Iterator[Advice]:
    yield from _settings(facts)
    yield from _driver(facts)
    yield from _libraries(facts)
    message = facts.probe.message or "nothing about it"
    yield Advice(
        f"the cause is not known. TensorFlow says: {message}.",
        "If that does not explain it, put TF_CPP_MAX_VLOG_LEVEL=3 before a command to "
        "see every file that TensorFlow opens.",
    )


def _settings(facts: Facts) -> Iterator[Advice]:
    visible = facts.nvidia.visible_devices
    if visible is not None and (facts.probe.gpus or visible.strip() in ("", "-1")):
        yield Advice(
            f"CUDA_VISIBLE_DEVICES={visible} hides the rest.",
            "Unset the variable to use all of them.",
            broken=False,
        )
    if not facts.probe.cuda:
        yield Advice(
            "it was built without CUDA.",
            f"pip uninstall tensorflow tensorflow-cpu, and then {facts.install}.",
        )


def _driver(facts: Facts) -> Iterator[Advice]:
    (driver,) = (library for library in facts.libraries if library.name == DRIVER)
    smi_error = facts.nvidia.smi_error
    if "insufficient permissions" in smi_error.lower():
        yield Advice(
            f"this user may not use them. nvidia-smi says: {smi_error}.",
            "Add the user to the group of /dev/nvidia0 (ls -l shows it; often video or "
            "render) and log in again; on a cluster, request a GPU from its scheduler.",
        )
    # What nvidia-smi says if the driver's module is not in the kernel.
    if driver.error or "communicate with the nvidia driver" in smi_error.lower():
        yield Advice(
            f"NVIDIA's driver cannot be used: {driver.error or smi_error}.",
            _install_driver(facts.machine),
        )
    if driver.version and numbers(driver.version) < (12, 0):
        yield Advice(
            f"the driver runs CUDA {driver.version} at most; TensorFlow needs 12.",
            f"Install NVIDIA's {DRIVER_555} and restart the machine.",
        )
    if driver.status:
        unknown = ("NVIDIA documents it under CUresult", "Restart the machine.")
        meaning, fix = _STATUS.get(driver.status, unknown)
        yield Advice(f"CUDA does not start, error {driver.status}: {meaning}.", fix)


def _install_driver(machine: Machine) -> str:
    if machine.container:
        return (
            "Start the container with --gpus all (Docker, with the NVIDIA Container "
            "Toolkit on the host) or with a limit nvidia.com/gpu (Kubernetes), and "
            "with NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    if machine.wsl:
        return "Install NVIDIA's driver in Windows, none in WSL; run wsl --shutdown."
    return (
        f"Install {DRIVER_555} with its libraries for computing (Ubuntu: sudo "
        "ubuntu-drivers install) and restart the machine. With Secure Boot its module "
        "has to be signed; sudo dmesg shows why it does not load."
    )


def _libraries(facts: Facts) -> Iterator[Advice]:
    failing = [
        library
        for library in facts.libraries
        if library.error and library.name in NEEDED
    ]
    errors = "; ".join(f"{library.name} ({library.error})" for library in failing)
    if not failing:
        return
    extra = "gpu-old" if facts.has_old_gpu else "gpu"
    fix = (
        f"{facts.install}, or in this project's folder: pip install -e '.[{extra}]'. "
        "The system's CUDA 13 does not help: its libraries have other names."
    )
    if any(library.shadows_wheel for library in failing):
        fix = f"{UNSET_LIBRARY_PATH}."
    elif any(library.in_wheel for library in failing):
        fix = f"{facts.install} --force-reinstall."
    yield Advice(f"the libraries that it opens cannot all be loaded: {errors}.", fix)
