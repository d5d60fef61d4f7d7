"""`--initial_weights`: what can be checked of it before TensorFlow starts.

It is `imagenet`, a file that Keras has written, or the directory of a run.
"""

from cifar10.config import layout
from cifar10.errors import UsageError, printable, reason
from cifar10.models import names
from cifar10.process import files

IMAGENET = "imagenet"
KERAS_FILE, WEIGHTS_FILE = ".keras", ".weights.h5"
# The distortions that scale all images alike; the others scale each one by itself.
_OF_ONE_SCALE = ("flip_translate", "flip_translate_far", "random_resized_crop", "none")


def check(name: str | None, model: str, distortions: str) -> None:
    """Refuses weights that a model cannot begin with."""
    if name != IMAGENET:
        return
    if not names.of_application(model):
        raise UsageError(
            f"--initial_weights imagenet: {model} has no published weights. Give "
            "--model applications:NAME,\nas applications:MobileNetV2, or name a file "
            "or the directory of a run."
        )
    if distortions not in _OF_ONE_SCALE:
        raise UsageError(
            f"--initial_weights imagenet: --distortions {distortions} scales each "
            "image by its own mean and deviation,\nand the network was trained on "
            "pixels, which cannot be restored from it.\nGive --distortions "
            f"{' or '.join(_OF_ONE_SCALE)}."
        )


def check_use(name: str | None, pretrained_rate: float) -> None:
    """Refuses a rate for pretrained layers if there are no initial weights."""
    if name is None and pretrained_rate != 1.0:
        raise UsageError(
            f"pretrained_rate of the recipe: {pretrained_rate} applies to "
            "layers with initial weights, and there are none.\nAdd --initial_weights, "
            "or remove it from a copy of the recipe."
        )


def check_place(name: str) -> None:
    """Refuses a file or a directory that a training cannot begin with."""
    if name == IMAGENET:
        return
    path, said = layout.locate_run(name), f"--initial_weights {printable(name)}"
    if path.is_dir():
        if not (path / layout.CONFIG).exists():
            raise UsageError(
                f"{said}: the directory holds no run ({layout.CONFIG} is missing).\n"
                "Name that of a training, or a .keras or .weights.h5 file."
            )
    elif not name.endswith((KERAS_FILE, WEIGHTS_FILE)):
        problem = "it is of another kind" if path.exists() else "there is no such file"
        raise UsageError(
            f"{said}: {problem}.\nGive a .keras or .weights.h5 file, the directory of "
            "a run, or imagenet."
        )
    else:
        try:
            files.opened(path, follow=True).close()
        except OSError as error:
            raise UsageError(f"{said}: it cannot be read: {reason(error)}.") from error
