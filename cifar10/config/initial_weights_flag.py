"""`--initial_weights`: what it names, as far as that is known before TensorFlow starts.

It is `imagenet`, a file that Keras has written, or the directory of a run.
"""

from cifar10.config import paths, regular_files
from cifar10.errors import UsageError, printable, reason
from cifar10.models import names

IMAGENET = "imagenet"
KERAS_FILE, WEIGHTS_FILE = ".keras", ".weights.h5"
# Of those of `Config.distortions`; the others give every image a scale of its own.
_OF_ONE_SCALE = ("flip_translate", "flip_translate_far", "random_resized_crop")


def check(name: str | None, model: str, distortions: str) -> None:
    """Refuses what a model cannot begin with."""
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
    """Refuses a rate for what begins with initial weights if nothing does."""
    if name is None and pretrained_rate != 1.0:
        raise UsageError(
            f"pretrained_rate of the recipe: {pretrained_rate} is for what is not new, "
            "and all is new.\nAdd --initial_weights, or take it out of a copy."
        )


def check_place(name: str) -> None:
    """Refuses a file or a directory that a training cannot begin with."""
    if name == IMAGENET:
        return
    path, said = paths.locate_run(name), f"--initial_weights {printable(name)}"
    if path.is_dir():
        if not (path / paths.CONFIG).exists():
            raise UsageError(
                f"{said}: the directory holds no run ({paths.CONFIG} is missing).\n"
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
            regular_files.opened(path, follow=True).close()
        except OSError as error:
            raise UsageError(f"{said}: it cannot be read: {reason(error)}.") from error
