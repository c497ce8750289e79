"""CIFAR-10 in memory: the full set from where it is or can be had, or the embedded sample, never one in place of the other
without a word.

All 60,000 images are 184 MB as uint8; one read of everything beats every streaming loader here. Normalising and augmenting
run on the device (`experiments.augment`).
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import download, sample
from experiments.cifar_files import CLASSES, FOLDER, TEST_FILES, TRAIN_FILES, URL, BatchFile, read_batches
from experiments.errors import DataError, DataUnavailableError
from experiments.prepared import find_prepared, read_prepared

SOURCES = ("auto", "cifar10", "sample")
_FULL = sum(file.records for file in TRAIN_FILES)
# The most training images that a source has: what can be checked before it is fetched is checked against them.
TRAINING_IMAGES = {"auto": _FULL, "cifar10": _FULL, "sample": sample.TRAIN.records}


def is_certain(source: str, directory: str | None) -> bool:
    """Says whether the number of training images is known before they are fetched: from `auto` the sample may come."""
    return source != "auto" or directory is not None


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels in host memory.

    Attributes:
      name: `cifar10` or `sample`, as records say it.
      train_images: uint8 of shape (images, 32, 32, 3: red, green, blue).
      train_labels: int32 of shape (images,).
      test_images: as `train_images`.
      test_labels: as `train_labels`.
      classes: the names of the labels.
      origin: one line that says where the images came from.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]
    origin: str


def load(source: str = "auto", directory: Path | None = None) -> Dataset:
    """Loads CIFAR-10 or the embedded sample.

    Args:
      source: `cifar10` is the full set or an error; `sample` is the embedded sample; `auto` is the full set, or, where
        it is not on this machine and cannot be had, the sample with one line on standard error.
      directory: where the full set lies: the data set's own binary files, or a TFDS data directory with a prepared
        `cifar10`. A directory that is given must hold the full set, whatever the source. None means TFDS's data
        directory, into which the set is downloaded if need be.

    Returns:
      The data set; from `auto` look at its `name`.

    Raises:
      DataError: an unknown source, a file that is missing, truncated or corrupted, or a full set that cannot be had.

    Example:
      >>> data = load("sample")
      >>> data.name, data.train_images.shape, data.test_images.shape
      ('sample', (1000, 32, 32, 3), (500, 32, 32, 3))
      >>> data.classes[data.train_labels[0]]
      'frog'
    """
    if source not in SOURCES:
        raise DataError(f"the data must be one of {', '.join(SOURCES)}, is {source!r}")
    if source == "sample":
        if directory is not None:
            raise DataError(
                f"the sample is part of the program and takes no directory, given is {directory}: "
                "leave the directory out, or ask for 'cifar10'"
            )
        return _load_sample()
    if directory is not None:
        return _full(read_directory(directory), str(directory))
    try:
        return _load_cached_or_fetched()
    except DataUnavailableError as error:
        remedy = f"Fetch {URL} where there is a network, unpack it, and give its folder with --data-dir"
        if source == "cifar10":
            raise DataUnavailableError(f"{error}. {remedy}, or train on the embedded sample (--data sample)") from None
        print(
            f"WARNING: training on the embedded SAMPLE of 1,000 + 500 images, NOT on CIFAR-10: {error}. {remedy}.",
            file=sys.stderr,
        )
        return _load_sample()


def read_directory(
    directory: Path, train_files: Sequence[BatchFile] = TRAIN_FILES, test_files: Sequence[BatchFile] = TEST_FILES
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reads the full set from a directory, in the data set's original order whatever its form.

    Args:
      directory: holds the binary files, or their folder `cifar-10-batches-bin`, or is a TFDS data directory.
      train_files: what the training files must be.
      test_files: what the test files must be.

    Returns:
      Training images, training labels, test images and test labels, as in `Dataset`.

    Raises:
      DataError: the directory holds no CIFAR-10 in a form that is read here, or a file of it is wrong.
    """
    forms = f"the six .bin files of CIFAR-10, their folder {FOLDER}, or a TFDS data directory with cifar10"
    try:
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "does not exist"
            raise DataError(f"{directory}: must be a directory with {forms}; it {what}")
        folders = (directory, directory / FOLDER)
        binary = [f for f in folders if any((f / batch.name).exists() for batch in (*train_files, *test_files))]
        prepared = find_prepared(directory)
        contents = sorted(path.name for path in directory.iterdir())
    except OSError as error:  # not allowed to look, or no name for a folder
        raise DataError(f"{directory}: must be a directory with {forms}: {error.strerror or error}") from None
    if binary:
        return *read_batches(binary[0], train_files), *read_batches(binary[0], test_files)
    if prepared is not None:
        return *read_prepared(prepared, "train", train_files), *read_prepared(prepared, "test", test_files)
    raise DataError(f"{directory}: must hold {forms}; {_describe(contents)}")


def _load_cached_or_fetched() -> Dataset:
    cache = download.cache_directory()
    archive = download.cifar10_archive()
    try:
        there = download.find_extracted(cache, archive) or find_prepared(cache / "cifar10")
    except OSError as error:
        raise DataUnavailableError(f"{cache} cannot be looked into: {error.strerror or error}") from None
    folder = there or download.fetch(cache, archive)
    try:
        return _full(read_directory(folder), str(folder))
    except DataError as error:
        raise DataError(f"{error} That is TFDS's cache: delete {folder}, and the next run fills it again.") from None


def _full(arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], origin: str) -> Dataset:
    return Dataset("cifar10", *arrays, CLASSES, origin)


def _load_sample() -> Dataset:
    origin = "the embedded sample"
    return Dataset("sample", *sample.read_part(sample.TRAIN), *sample.read_part(sample.TEST), CLASSES, origin)


def _describe(names: list[str]) -> str:
    """What the entries of a wrong directory say, with the remedy for the mistakes that are easily made."""
    if "cifar-10-binary.tar.gz" in names:
        return "it holds the packed archive: unpack it (tar xzf cifar-10-binary.tar.gz)"
    if {"cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1"} & set(names):
        return f"it holds the pickled Python version, which is not read: fetch the binary version, {URL}"
    if not names:
        return f"it is empty: unpack {URL} into it"
    return f"it holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}: give another, or unpack {URL} into it"
