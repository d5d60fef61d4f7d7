"""Folders of public data sets, as their documents describe them: read, or refused."""

import pytest

from cifar10.errors import UsageError
from small_folders import find, numbered, write

TWO = ("cat", "dog")


def each(*folders, of=TWO, count=3):
    return numbered(count, *(f"{folder}/{name}" for folder in folders for name in of))


def made(directory, names):
    """Writes pictures, and other files, which are no pictures."""
    pictures = [name for name in names if name.endswith(".png")]
    for name in {*names} - {*pictures}:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"text")
    return write(directory, *pictures)


# What is in the folder, and its classes, and the count of pictures in each part.
READ = {
    "Roboflow: train, valid, test, and its notes": (
        [*each("train", "valid", "test"), "README.roboflow.txt"],
        TWO,
        {"train": 6, "val": 6, "test": 6},
    ),
    "Kaggle's cats and dogs: training_set, test_set": (
        each("training_set", "test_set", of=("cats", "dogs")),
        ("cats", "dogs"),
        {"train": 6, "test": 6},
    ),
    "ImageNet, with val sorted into classes": (
        each("train", "val", of=("n01440764", "n01443537")),
        ("n01440764", "n01443537"),
        {"train": 6, "test": 6},
    ),
    "Flowers: one folder per class, beside a license": (
        [*numbered(10, "daisy", "roses", "tulips"), "LICENSE.txt"],
        ("daisy", "roses", "tulips"),
        {"train": 21, "test": 9},
    ),
    "Food-101: the folder images, whose classes have many pictures": (
        numbered(10, "apple_pie", "baby_back_ribs"),
        ("apple_pie", "baby_back_ribs"),
        {"train": 14, "test": 6},
    ),
    "EuroSAT: one folder per class": (
        [
            f"{name}/{name}_{n}.png"
            for name in ("AnnualCrop", "SeaLake")
            for n in "0123"
        ],
        ("AnnualCrop", "SeaLake"),
        {"train": 6, "test": 2},
    ),
    "Fruits-360: Training, Test, and pictures of several fruits": (
        [
            *each("Training", "Test", of=("Apple 10", "Apple Red 1")),
            "test-multiple_fruits/apple_0.png",
            "papers/1.pdf",
        ],
        ("Apple 10", "Apple Red 1"),
        {"train": 6, "test": 6},
    ),
    "Caltech-256: numbered classes, and clutter": (
        numbered(10, "001.ak47", "002.american-flag", "257.clutter"),
        ("001.ak47", "002.american-flag", "257.clutter"),
        {"train": 21, "test": 9},
    ),
    "chest X-rays: train, val, test, unpacked on a Mac": (
        [
            *each("train", "val", "test", of=("NORMAL", "PNEUMONIA")),
            "__MACOSX/train/NORMAL/._0.png",
            "chest_xray/train/NORMAL/0.png",
            "train/.DS_Store",
        ],
        ("NORMAL", "PNEUMONIA"),
        {"train": 6, "val": 6, "test": 6},
    ),
    "tiny ImageNet: train/CLASS/images, without its other parts": (
        [*numbered(5, "train/n1/images", "train/n2/images"), "train/n1/n1_boxes.txt"],
        ("n1", "n2"),
        {"train": 6, "test": 4},
    ),
    "Stanford Dogs: numbered names of breeds": (
        numbered(10, "n02085620-Chihuahua", "n02085782-Japanese_spaniel"),
        ("n02085620-Chihuahua", "n02085782-Japanese_spaniel"),
        {"train": 14, "test": 6},
    ),
    "BreakHis: subtypes, patients and scales within the classes": (
        [
            f"{name}/SOB/{name}_{kind}/{name}_{kind}_{patient}/{scale}X/1.png"
            for name in ("benign", "malignant")
            for kind in "AF"
            for patient in "12"
            for scale in (40, 400)
        ],
        ("benign", "malignant"),
        {"train": 12, "test": 4},
    ),
    "car makers and their models": (
        numbered(3, "audi/a4", "audi/a6", "bmw/320", "bmw/520"),
        ("audi", "bmw"),
        {"train": 8, "test": 4},
    ),
    "numbers as names: digits, grades": (
        numbered(3, "grade 0", "grade 1", "grade 2", "3"),
        ("3", "grade 0", "grade 1", "grade 2"),
        {"train": 8, "test": 4},
    ),
    "numbers in parentheses in all names": (
        numbered(3, "cat (1)", "dog (1)"),
        ("cat (1)", "dog (1)"),
        {"train": 4, "test": 2},
    ),
    "a class with a few pictures beside its folders": (
        [*numbered(9, "cat", "dog"), *each("cat", "dog", of=("new", "old"), count=1)],
        TWO,
        {"train": 16, "test": 6},
    ),
}
# What is in the folder, and what the refusal says.
REFUSED = {
    "ImageNet's val as it comes, without classes": (
        [*each("train"), "val/ILSVRC2012_val_00000001.png"],
        "val/CLASS/",
    ),
    "Kaggle's competition: a test part without labels": (
        [*each("train"), "test/test/1.png", "test/test/2.png"],
        "lacks classes of test/: test",
    ),
    "Kaggle's cats against dogs: the class in the file's name": (
        ["train/cat.0.png", "train/dog.0.png", "test1/1.png"],
        "no class folders",
    ),
    "Food-101 whole: images beside meta": (
        [*each("images"), "meta/classes.txt"],
        "food/images.",
    ),
    "EuroSAT as unpacked: a folder 2750": (each("2750"), "food/2750."),
    "GTSRB: Final_Training/Images": (
        [*each("Final_Training/Images", of=("00000", "00001")), "Final_Test/1.png"],
        "food/Final_Training/Images.",
    ),
    "GTSRB of Kaggle: each folder twice": (
        [*each("Train", "train", of=("0", "1")), "Test/1.png", "test/1.png"],
        "the same split",
    ),
    "Oxford pets: all pictures in one folder": (
        ["images/Abyssinian_1.png", "images/beagle_1.png", "annotations/list.txt"],
        "in 1 class",
    ),
    "Oxford pets with the masks": (
        ["images/beagle_1.png", "annotations/trimaps/beagle_1.png"],
        "do not look like classes",
    ),
    "CUB-200: images beside segmentations of the same classes": (
        each("images", "segmentations", of=("001.Albatross", "002.Laysan")),
        "001.Albatross, 002.Laysan",
    ),
    "Caltech-101 as unpacked": (
        [*each("101_ObjectCategories"), "Annotations/cat/1.mat"],
        "food/101_ObjectCategories.",
    ),
    "Intel's scenes: seg_train/seg_train": (
        [*each("seg_train/seg_train", "seg_test/seg_test"), "seg_pred/seg_pred/1.png"],
        "do not look like classes",
    ),
    "histopathology, by patient": (
        each("10253", "10254", "10255", of=("0", "1")),
        "but hold 0, 1",
    ),
    "dermatology, by patient within the parts": (
        each("train/p1", "train/p2", "test/p1", of=("benign", "malignant")),
        "but hold benign, malignant",
    ),
    "PACS: domains with the same classes": (
        each("art_painting", "cartoon", "photo"),
        "but hold cat, dog",
    ),
    "a copy of the classes beside them": (
        each("brain_tumor_dataset", ".", of=("no", "yes")),
        "do not look like classes",
    ),
    "CycleGAN: two domains in parts": (
        numbered(3, "trainA", "trainB", "testA", "testB"),
        "do not look like classes",
    ),
    "Office-31: domains of images of the same classes": (
        each("amazon/images", "dslr/images", of=("bike", "mug")),
        "but hold bike, mug",
    ),
    "domains with their own names for images, and a picture beside these": (
        [*each("amazon/img", "dslr/pics", of=("bike", "mug")), "amazon/1.png"],
        "but hold bike, mug",
    ),
    "domains, one with half of the classes": (
        [*each("amazon", of="abcd"), *each("dslr", of="ab")],
        "but hold a, b",
    ),
    "a copy of the classes with a picture of its own": (
        [*each("classes copy", "."), "classes copy/overview.png"],
        "but hold cat, dog: classes copy",
    ),
    "an older state of the classes beside them": (
        [*each("2019", of=("cat", "dog", "cow")), *each(".")],
        "cow and 1 more: 2019",
    ),
    "a folder of classes and loose pictures": (
        [*each("photos"), *numbered(2, "photos")],
        "If cat, dog are classes or splits, give",
    ),
    "patients whose pictures have one label each": (
        numbered(3, "p1/benign", "p2/benign", "p3/malignant", "p4/malignant"),
        "but hold benign, malignant",
    ),
    "parts in the names of classes": (
        numbered(3, "train_cat", "train_dog", "test_cat", "test_dog"),
        "like splits",
    ),
    "parts at the end of names": (numbered(3, "cowVal", "cowTrain", "emu"), "splits"),
    "ASL: one part in folders, one loose": (
        [*each("asl_train", of="AB"), *numbered(3, "asl_test")],
        "like splits",
    ),
    "train1, train2 without classes": (
        numbered(3, "train1", "train2"),
        "no class folders",
    ),
    "STL-10 as pictures: a part without labels, and no test part": (
        [*each("train"), "unlabeled/1.png"],
        "Move that away",
    ),
}


REFUSED |= {
    "Pascal VOC: masks as pictures": (
        numbered(2, "JPEGImages", "SegmentationClass", "SegmentationObject"),
        "like pictures and their masks",
    ),
    "images and their masks, singular": (
        numbered(2, "image", "mask"),
        "like pictures and their masks",
    ),
    "images and ground truth": (
        numbered(2, "images", "ground_truth"),
        "like pictures and their masks",
    ),
    "masks of each class": (
        numbered(2, "cat", "cat_masks", "dog", "dog_masks"),
        "like pictures and their masks",
    ),
    "HAM10000: two parts of a download": (
        numbered(2, "HAM10000_images_part_1", "HAM10000_images_part_2"),
        "like splits",
    ),
    "Kaggle: test pictures without labels": (
        numbered(2, "cat", "dog", "test"),
        "test/ is named like a split",
    ),
    "the same with other words": (numbered(2, "cat", "dog", "Validation"), "rename it"),
    "a split under another name": (
        numbered(2, "learn/a", "learn/b", "test/a", "test/b"),
        "rename it to train/",
    ),
}


REFUSED |= {
    f"portions: {word}1, {word}2": (numbered(2, f"{word}1", f"{word}2"), "like splits")
    for word in ("part", "fold", "batch_", "Split ", "shard-0", "patient_00", "set")
} | {
    f"a copy: {name}": (numbered(2, "cat", "dog", name), f": {name}. Give")
    for name in ("cat copy 2", "Kopie von cat", "cat (1)", "cat - Copy", "犬 - コピー")
}


READ |= {
    "BUSI: a mask beside each picture": (
        [
            f"{c}/{c} ({n}){of}.png"
            for c in ("benign", "normal")
            for n in range(4)
            for of in ("", "_mask", "_mask_1")
        ],
        ("benign", "normal"),
        {"train": 6, "test": 2},
    ),
    "masks named before their pictures": (
        [f"{c}/{of}{n}.png" for c in "ab" for n in range(4) for of in ("", "mask_")],
        ("a", "b"),
        {"train": 6, "test": 2},
    ),
    "a folder of masks in each class": (
        [f"{c}/{of}{n}.png" for c in "ab" for n in range(4) for of in ("", "masks/")],
        ("a", "b"),
        {"train": 6, "test": 2},
    ),
    "pictures of masks alone": (
        [f"{name}/{number}_mask.png" for name in "ab" for number in range(4)],
        ("a", "b"),
        {"train": 6, "test": 2},
    ),
    "classes that are called masks": (
        numbered(4, "with_mask", "without_mask", "masks"),
        ("masks", "with_mask", "without_mask"),
        {"train": 9, "test": 3},
    ),
    "a class called like a split, of two": (
        numbered(4, "valid", "invalid"),
        ("invalid", "valid"),
        {"train": 6, "test": 2},
    ),
    "classes that are pictures or masks among others": (
        numbered(4, "lamp", "mask", "picture"),
        ("lamp", "mask", "picture"),
        {"train": 9, "test": 3},
    ),
    "makes of cars": (
        numbered(4, "Ford", "Ford GT", "Mustang", "Mustang GT"),
        ("Ford", "Ford GT", "Mustang", "Mustang GT"),
        {"train": 12, "test": 4},
    ),
    "numbered sets of bricks": (
        numbered(4, "Lego Set 75001", "Lego Set 75002"),
        ("Lego Set 75001", "Lego Set 75002"),
        {"train": 6, "test": 2},
    ),
    "a class of sets, and numbers": (
        numbered(4, "sunset 1", "sunset 2", "1", "2"),
        ("1", "2", "sunset 1", "sunset 2"),
        {"train": 12, "test": 4},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_public_layout_is_read(tmp_path, name):
    names, classes, counts = READ[name]
    dataset = find(made(tmp_path / "set", names), tmp_path / "cache")
    assert dataset.class_names == classes
    assert {part: len(dataset.read(part)[1]) for part in dataset.splits} == counts


@pytest.mark.parametrize("name", REFUSED)
def test_an_ambiguous_public_layout_is_refused(tmp_path, name):
    names, said = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        find(made(tmp_path / "food", names), tmp_path / "cache")
    assert said in str(caught.value)
