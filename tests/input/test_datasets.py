"""Which data set is found where: one situation a test, none with a network."""

import dataclasses
import os

import pytest

import sites
from cifar10.errors import UsageError
from cifar10.input import cifar, datasets, download, records, synthetic, transfer
from small_sets import PACKED, SMALL, write_files

# A port at which nobody listens, reserved by RFC 6335 for just one old service.
NO_NETWORK = "http://127.0.0.1:1/"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes the data sets small and the published URLs unreachable."""
    monkeypatch.setenv("no_proxy", "*")
    for name, file_format in SMALL.items():
        monkeypatch.setitem(cifar.FORMATS, name, file_format)
        packed = sites.archive_of(PACKED[name])
        archive = dataclasses.replace(
            cifar.ARCHIVES[name], size=packed.size, md5=packed.md5, url=NO_NETWORK
        )
        monkeypatch.setitem(cifar.ARCHIVES, name, archive)


@pytest.fixture
def environ(tmp_path):
    """The environment of a user with an empty home."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home")}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / ".cache" / "cifar10"


@pytest.fixture
def mirror(tmp_path):
    """A URL from which both archives can be had."""
    directory = tmp_path / "mirror"
    directory.mkdir()
    for name, content in PACKED.items():
        (directory / cifar.ARCHIVES[name].name).write_bytes(content)
    return directory.as_uri() + "/"


@pytest.fixture
def quick_stand_in(monkeypatch):
    """Makes the stand-in small too; test_synthetic.py generates the full one."""
    file_format = dataclasses.replace(
        cifar.SYNTHETIC, train_records_per_file=10, test_records_per_file=10
    )
    monkeypatch.setattr(synthetic, "FORMAT", file_format)
    monkeypatch.setattr(cifar, "SYNTHETIC", file_format)
    monkeypatch.setitem(cifar.FORMATS, "synthetic", file_format)


PLACES = {
    "the files themselves": write_files,
    "their folder": lambda home, name: write_files(home / SMALL[name].folder, name),
    "the archive": lambda home, name: (
        home.mkdir(parents=True),
        (home / cifar.ARCHIVES[name].name).write_bytes(PACKED[name]),
    ),
}


@pytest.mark.parametrize("named_by", ["flag", "variable", "nothing"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("data", ["auto", "cifar10", "cifar100"])
def test_a_local_copy(tmp_path, environ, cache, data, place, named_by):
    name = "cifar10" if data == "auto" else data
    home = cache if named_by == "nothing" else tmp_path / "data"
    PLACES[place](home, name)
    if named_by == "variable":
        environ["CIFAR10_DATA_DIR"] = str(home)
    flag = str(home) if named_by == "flag" else None
    found = datasets.find(data, flag, NO_NETWORK, environ)
    # A folder that the flag names is only read, so an archive is unpacked elsewhere.
    unpacked = cache if (place, named_by) == ("the archive", "flag") else home
    in_folder = place != "the files themselves"
    assert found.directory == (unpacked / SMALL[name].folder if in_folder else home)
    assert found.name == name
    assert found.is_real
    assert found.classes == len(found.class_names) == SMALL[name].classes
    assert found.description == f"{SMALL[name].title} in {found.directory}"
    images, labels = found.read("train")
    assert images.shape[1:] == (32, 32, 3)
    assert set(labels.tolist()) == {3}


def test_pictures_are_prepared_in_the_users_cache_and_not_where_data_is_read(
    tmp_path, environ, cache
):
    environ["CIFAR10_DATA_DIR"] = str(tmp_path)
    assert datasets.cache_of_pictures(environ) == cache
    environ["XDG_CACHE_HOME"] = "relative"  # As the standard says, it does not count.
    assert datasets.cache_of_pictures(environ) == cache
    environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert datasets.cache_of_pictures(environ) == tmp_path / "xdg" / "cifar10"


def test_the_flag_goes_before_the_variable(tmp_path, environ):
    write_files(tmp_path / "flag", "cifar10")
    write_files(tmp_path / "variable", "cifar10")
    environ["CIFAR10_DATA_DIR"] = str(tmp_path / "variable")
    by_variable = datasets.find("auto", None, NO_NETWORK, environ)
    assert by_variable.directory == tmp_path / "variable"
    by_flag = datasets.find("auto", str(tmp_path / "flag"), NO_NETWORK, environ)
    assert by_flag.directory == tmp_path / "flag"


@pytest.mark.parametrize("data", ["auto", "cifar10", "cifar100"])
def test_a_download(environ, cache, mirror, data):
    name = "cifar10" if data == "auto" else data
    found = datasets.find(data, None, f"{NO_NETWORK},{mirror}", environ)
    assert found.is_real
    assert found.directory == cache / SMALL[name].folder
    # The second time nothing is asked of the network.
    assert datasets.find(data, None, NO_NETWORK, environ) == found


@pytest.mark.parametrize("data", ["auto", "cifar10"])
def test_the_variable_may_name_a_folder_that_is_yet_to_be_filled(
    tmp_path, environ, mirror, data
):
    environ["CIFAR10_DATA_DIR"] = str(tmp_path / "new")
    found = datasets.find(data, None, mirror, environ)
    assert found.directory == tmp_path / "new" / SMALL["cifar10"].folder


@pytest.mark.parametrize("data", ["auto", *cifar.FORMATS])
@pytest.mark.parametrize("holds", ["pictures", "nothing", None])
def test_a_named_folder_without_the_data_set(tmp_path, environ, mirror, data, holds):
    home = tmp_path / "photos"
    if holds:
        home.mkdir()
    if holds == "pictures":
        (home / "cat.png").touch()
    before = sorted(tmp_path.rglob("*"))
    # There is a mirror to download from, and it is not used.
    with pytest.raises(UsageError, match=f"--data_dir {home} .*\nCorrect it, or leave"):
        datasets.find(data, str(home), mirror, environ)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_without_a_network(environ, cache, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr(transfer.time, "sleep", waits.append)
    found = datasets.find("auto", None, None, environ)
    assert waits == []
    assert found.name == "synthetic"
    assert not found.is_real
    assert found.directory == cache / synthetic.FOLDER
    assert found.class_names == synthetic.CLASS_NAMES
    assert found.description.startswith("SYNTHETIC stand-in, NOT CIFAR-10 (none in ")
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    for part in (NO_NETWORK, "Connection refused", "SYNTHETIC stand-in", str(cache)):
        assert part in said


@pytest.mark.usefixtures("quick_stand_in")
def test_synthetic(environ, cache, capsys):
    found = datasets.find("synthetic", None, NO_NETWORK, environ)
    assert found.directory == cache / synthetic.FOLDER
    assert "NOT CIFAR-10 (as --data synthetic requests)" in found.description
    assert found.read("test")[0].shape == (10, 32, 32, 3)
    assert capsys.readouterr().err == ""
    assert datasets.find("synthetic", None, NO_NETWORK, environ) == found


@pytest.mark.usefixtures("quick_stand_in")
def test_the_stand_ins_own_folder_may_be_named(environ, cache):
    found = datasets.find("synthetic", None, None, environ)
    for named in (found.directory, cache):
        again = datasets.find("synthetic", str(named), None, environ)
        assert again.directory == found.directory == cache / synthetic.FOLDER


@pytest.mark.usefixtures("quick_stand_in")
def test_the_stand_in_keeps_out_of_the_variables_folder(tmp_path, environ, cache):
    environ["CIFAR10_DATA_DIR"] = str(tmp_path / "shared")
    found = datasets.find("synthetic", None, NO_NETWORK, environ)
    assert found.directory == cache / synthetic.FOLDER


@pytest.mark.usefixtures("quick_stand_in")
def test_a_run_keeps_the_reason_for_its_data_set(environ, monkeypatch):
    monkeypatch.setenv("HOME", environ["HOME"])
    found = datasets.find("auto", None, None, environ)
    assert "no download" in found.description
    settings = {
        "data": "synthetic",
        "data_dir": str(found.directory),
        "data_url": None,
        "data_description": found.description,
    }
    assert datasets.find_again(settings) == found


def test_a_read_only_folder(tmp_path, environ, cache, monkeypatch):
    # Permissions do not bind root, so the question itself is answered.
    home = tmp_path / "data"
    PLACES["the archive"](home, "cifar10")
    monkeypatch.setattr(os, "access", lambda path, _: path != home)
    environ["CIFAR10_DATA_DIR"] = str(home)
    found = datasets.find("auto", None, NO_NETWORK, environ)
    assert found.directory == cache / SMALL["cifar10"].folder
    assert [path.name for path in home.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_the_stand_in_cannot_be_written(environ, cache):
    cache.parent.parent.joinpath(".cache").touch()
    with pytest.raises(UsageError, match=r"\.cache.* cannot be read or written"):
        datasets.find("synthetic", None, NO_NETWORK, environ)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a missing file": (lambda path: path.unlink(), "lacks data_batch_4.bin"),
    "a file cut short": (cut, "data_batch_4.bin has 1 records and 3072 bytes"),
    "an empty file": (
        lambda path: path.write_bytes(b""),
        "data_batch_4.bin has 0 records and 0 bytes",
    ),
    "a record too few": (
        lambda path: path.write_bytes(path.read_bytes()[:3073]),
        "data_batch_4.bin has 1 records and 0 bytes",
    ),
}


@pytest.mark.parametrize("data", ["auto", "cifar10"])
@pytest.mark.parametrize("in_folder", [True, False])
@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_copy_is_never_passed_over(
    tmp_path, environ, mirror, data, in_folder, case
):
    change, message = DAMAGES[case]
    folder = (
        tmp_path / "data" / SMALL["cifar10"].folder if in_folder else tmp_path / "x"
    )
    write_files(folder, "cifar10")
    change(folder / "data_batch_4.bin")
    home = folder.parent if in_folder else folder
    before = sorted(tmp_path.rglob("*"))
    # There is a mirror to download from, and it is not used.
    with pytest.raises(UsageError) as caught:
        datasets.find(data, str(home), mirror, environ)
    assert message in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_archive_is_never_passed_over(tmp_path, environ, mirror):
    PLACES["the archive"](tmp_path / "data", "cifar10")
    cut(tmp_path / "data" / "cifar-10-binary.tar.gz")
    with pytest.raises(UsageError, match="is not the published cifar-10-binary"):
        datasets.find("auto", str(tmp_path / "data"), mirror, environ)


def test_an_empty_folder_in_place_of_the_data(tmp_path, environ, mirror):
    (tmp_path / SMALL["cifar10"].folder).mkdir()
    with pytest.raises(UsageError, match=r"lacks data_batch_1\.bin, data_batch_2"):
        datasets.find("auto", str(tmp_path), mirror, environ)


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_insisting_without_a_network(environ, cache, data):
    with pytest.raises(UsageError) as caught:
        datasets.find(data, None, None, environ)
    message = str(caught.value)
    for part in (SMALL[data].title, SMALL[data].folder):
        assert part in message
    ways_on = ("--data_dir", "--data_url", "--data synthetic", "Connection refused")
    for part in (str(cache), cifar.ARCHIVES[data].name, *ways_on):
        assert part in message


@pytest.mark.parametrize("data", ["auto", *cifar.FORMATS])
@pytest.mark.parametrize("source", ["--data_dir", "CIFAR10_DATA_DIR"])
def test_a_file_in_place_of_the_folder(tmp_path, environ, data, source):
    path = tmp_path / "file"
    path.touch()
    environ |= {source: str(path)}
    flag = str(path) if source == "--data_dir" else None
    with pytest.raises(UsageError, match=f"{source} .* is a file"):
        datasets.find(data, flag, NO_NETWORK, environ)


def test_a_wrong_url_is_not_mistaken_for_a_missing_network(environ):
    with pytest.raises(UsageError, match="--data_url ftp"):
        datasets.find("auto", None, "ftp://a/b", environ)


def test_a_folder_that_may_not_be_looked_into(tmp_path, environ, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(cifar, "_local_copy", refuse)
    with pytest.raises(
        UsageError, match="cannot be read or written: Permission denied"
    ):
        datasets.find("auto", str(tmp_path), NO_NETWORK, environ)


def test_no_home_folder(monkeypatch):
    def fail():
        raise RuntimeError

    monkeypatch.setattr(cifar.Path, "home", fail)
    with pytest.raises(UsageError, match="no home folder"):
        datasets.find("auto", None, NO_NETWORK, {})


def test_the_published_archives_fit_their_formats():
    for format_, archive in (
        (records.CIFAR10, download.CIFAR10),
        (records.CIFAR100, download.CIFAR100),
    ):
        assert archive.folder == format_.folder
        assert archive.url.startswith("https://")
        assert archive.url.endswith("/" + archive.name)
        assert len(archive.md5) == 32
