"""Reading CIFAR-10: small files of the same format stand for the real ones, with checksums of their own."""

import hashlib
import lzma
import os
import sys

import numpy as np
import pytest

from experiments import data, download, sample
from experiments.augment import TRAIN_MEAN
from experiments.cifar_files import FOLDER, RECORD_BYTES, BatchFile, decode_records
from experiments.data import load, read_directory
from experiments.errors import DataError, DataUnavailableError, ExperimentError
from experiments.sample import make


@pytest.fixture
def files(tmp_path):
    """A folder with three training files of 4 records and a test file of 3, and what they must be."""
    random = np.random.default_rng(0)
    specs = []
    for name, records in (
        ("data_batch_1.bin", 4),
        ("data_batch_2.bin", 4),
        ("data_batch_3.bin", 4),
        ("test_batch.bin", 3),
    ):
        contents = random.integers(0, 256, (records, RECORD_BYTES), dtype=np.uint8)
        contents[:, 0] = random.integers(0, 10, records)
        (tmp_path / name).write_bytes(contents.tobytes())
        specs.append(BatchFile(name, records, hashlib.md5(contents.tobytes()).hexdigest()))
    return tmp_path, specs[:3], specs[3:]


def test_a_record_is_a_label_and_three_planes():
    pixels = np.arange(3 * 32 * 32) % 251
    images, labels = decode_records(bytes([9, *pixels]))
    assert labels.tolist() == [9]
    for row, column, channel in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (31, 31, 2), (5, 6, 1)):
        assert images[0, row, column, channel] == (channel * 1024 + row * 32 + column) % 251


@pytest.mark.parametrize("below", ["", FOLDER])
def test_binary_files_are_read_in_order_from_the_folder_or_its_parent(files, tmp_path_factory, below):
    folder, train, test = files
    target = tmp_path_factory.mktemp("parent") / below
    target.mkdir(exist_ok=True)
    for batch in (*train, *test):
        (folder / batch.name).rename(target / batch.name)
    images, labels, test_images, test_labels = read_directory(target.parent if below else target, train, test)
    assert (images.shape, images.dtype, labels.dtype) == ((12, 32, 32, 3), np.uint8, np.int32)
    assert (test_images.shape, test_labels.shape) == ((3, 32, 32, 3), (3,))
    second = np.frombuffer((target / "data_batch_2.bin").read_bytes(), np.uint8)
    assert labels[4] == second[0]
    assert images[4, 0, :3, 0].tolist() == second[1:4].tolist()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def flip_a_bit(path):
    contents = bytearray(path.read_bytes())
    contents[1000] ^= 1
    path.write_bytes(contents)


def replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["must have 12,292 bytes (4 records)", "has 12,291", "truncated", "unpack"]),
        (lengthen, ["must have 12,292 bytes", "has 12,293"]),
        (flip_a_bit, ["must have the MD5", "corrupted", "unpack"]),
        (os.remove, ["12,292 bytes", "missing", "data_batch_1.bin, data_batch_3.bin", "unpack"]),
        (replace_by_a_folder, ["must be a readable file", "unpack"]),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_what_to_do(files, damage, words):
    folder, train, test = files
    damage(folder / "data_batch_2.bin")
    with pytest.raises(DataError) as caught:
        read_directory(folder, train, test)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'data_batch_2.bin'}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([], "it is empty"),
        (["cifar-10-binary.tar.gz"], "tar xzf"),
        (["cifar-10-batches-py"], "pickled Python version"),
        (["data_batch_1", "test_batch"], "pickled Python version"),
        (["a", "b", "c", "d", "e", "f"], "it holds a, b, c, d, e, …"),
    ],
)
@pytest.mark.parametrize("source", ["auto", "cifar10"])
def test_a_directory_without_the_set_is_an_error_and_never_the_sample(tmp_path, entries, word, source):
    for entry in entries:
        (tmp_path / entry).touch()
    with pytest.raises(DataError, match=r"must hold the six \.bin files") as caught:
        load(source, tmp_path)
    assert word in str(caught.value)


def test_a_path_that_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    for path, word in ((tmp_path / "none", "it does not exist"), (tmp_path / "file", "it is a file")):
        with pytest.raises(DataError, match=f"must be a directory .*; {word}"):
            load("auto", path)
    with pytest.raises(DataError, match=r"must be a directory .*: File name too long"):
        load("auto", tmp_path / ("x" * 300))


def test_a_wrong_source_and_a_directory_for_the_sample_are_refused(tmp_path):
    with pytest.raises(ExperimentError, match="one of auto, cifar10, sample, is 'cifar'"):
        load("cifar")
    with pytest.raises(DataError, match="takes no directory"):
        load("sample", tmp_path)


def test_without_a_network_auto_says_so_in_one_line_and_cifar10_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(download, "probe", lambda url: "no route to host")
    monkeypatch.setattr("tensorflow_datasets.download.DownloadManager", None)  # calling it would raise another error
    assert load("auto").name == "sample"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in ("WARNING", "SAMPLE", "NOT on CIFAR-10", "no route to host", "--data-dir"):
        assert word in err
    with pytest.raises(DataUnavailableError, match=r"no route to host.*--data-dir.*--data sample"):
        load("cifar10")
    assert list(tmp_path.iterdir()) == []


def test_without_tfds_auto_says_so_and_takes_the_sample(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # importing it now raises ImportError
    assert load("auto").name == "sample"
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "needs tensorflow-datasets" in err


def test_a_cache_that_may_not_be_looked_into_is_a_reason_for_the_sample(monkeypatch, capsys):
    def refuse(cache, archive):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(download, "find_extracted", refuse)
    assert load("auto").name == "sample"
    assert "cannot be looked into: Permission denied" in capsys.readouterr().err


def test_a_cached_set_that_is_damaged_is_an_error_even_for_auto(files, monkeypatch):
    folder, _, _ = files  # not the published files: too small
    monkeypatch.setattr(download, "find_extracted", lambda cache, archive: folder)
    with pytest.raises(DataError, match=r"must have 30,730,000 bytes.*delete"):
        load("auto")


def test_auto_takes_the_full_set_where_it_is(files, monkeypatch, capsys):
    folder, train, test = files
    monkeypatch.setattr(download, "find_extracted", lambda cache, archive: folder)
    monkeypatch.setattr(data, "read_directory", lambda directory: read_directory(directory, train, test))
    got = load("auto")
    assert (got.name, len(got.train_images), got.origin) == ("cifar10", 12, str(folder))
    assert capsys.readouterr().err == ""


def test_the_sample_is_the_beginning_of_cifar10():
    got = load("sample")
    assert got.name == "sample"
    assert got.train_images.shape == (1000, 32, 32, 3)
    assert got.train_images.dtype == np.uint8
    assert np.bincount(got.train_labels).tolist() == [100] * 10
    assert np.bincount(got.test_labels).tolist() == [50] * 10
    # Chosen in order, so the first images of each class are the first of CIFAR-10: these are its first labels.
    assert got.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert got.test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    # 1,000 images whose means scatter by about 0.12: their mean is within 0.015 (four standard errors) of all images'.
    np.testing.assert_allclose(got.train_images.mean((0, 1, 2)) / 255, TRAIN_MEAN, atol=0.015)
    assert sum(path.stat().st_size for path in sample.FOLDER.glob("*.xz")) <= 4_500_000


def test_making_the_sample_from_the_sample_gives_the_sample():
    images, labels = sample.read_part(sample.TRAIN)
    assert hashlib.md5(make.make_part(images, labels, sample.TRAIN)).hexdigest() == sample.TRAIN.md5


@pytest.mark.parametrize(
    ("contents", "word"),
    [
        (None, "readable file"),
        (b"not xz", "must be an xz file"),
        (lzma.compress(bytes(500 * RECORD_BYTES - 1)), "truncated"),
        (lzma.compress(bytes(500 * RECORD_BYTES)), "corrupted"),
    ],
)
def test_a_damaged_sample_is_named(tmp_path, contents, word):
    if contents is not None:
        (tmp_path / sample.TEST.name).write_bytes(contents)
    with pytest.raises(DataError, match=word) as caught:
        sample.read_part(sample.TEST, tmp_path)
    assert str(tmp_path / sample.TEST.name) in str(caught.value)


def test_make_reports_a_wrong_directory_with_status_2(tmp_path, capsys):
    assert make.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: must hold")
