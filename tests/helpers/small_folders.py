"""Helpers: folders of small pictures."""

import io

import numpy as np
from PIL import Image

from cifar10.config.fields import Dataset
from cifar10.input.pictures.dataset import find_folder
from cifar10.input.pictures.listing import list_folder

SIZE = 8


def packed(image, form="PNG", **options):
    """Returns the bytes of a file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)


def write(directory, *names, size=SIZE):
    """Writes a different PNG file under each name, `CLASS/FILE.png`."""
    for number, name in enumerate(names):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed(pixels(number, size)))
    return directory


def numbered(count, *classes):
    """Returns so many names of files for each class."""
    return [f"{name}/{number}.png" for name in classes for number in range(count)]


def find(directory, cache, **values):
    """Finds a folder's pictures at 8 x 8; 0.3 of them to test on, if it has no test."""
    has_test = "run" not in values and "test" in list_folder(directory).splits
    share = Dataset.validation_fraction if has_test else 0.3
    values = {"validation_fraction": share, "max_bad_images": 0.0, **values}
    return find_folder(directory, cache, **{"image_size": SIZE, **values})


def everything(dataset):
    """Returns the pixels of each picture, by its path, and which are to test on."""
    images, tests = {}, set()
    for split in ("train", "test"):
        paths = dataset.paths[split]
        images |= dict(zip(paths, dataset.read(split)[0], strict=True))
        tests |= {path for path in paths if split == "test"}
    return images, tests


def home_in(cache):
    """Returns the one folder of prepared pictures."""
    (home,) = cache.glob("pictures/*")
    return home


def files_in(cache):
    """Returns the content of the one folder of prepared pictures."""
    return {path.name: path.read_bytes() for path in home_in(cache).iterdir()}
