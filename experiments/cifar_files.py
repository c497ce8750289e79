"""CIFAR-10's own binary distribution: six files of 10,000 records, and how to read and check them.

A record is 3,073 bytes: the label, then 32 × 32 pixels of red, of green and of blue, row by row. The format and the order
of the images are those of https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-bin"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
RECORD_BYTES = 1 + 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class BatchFile:
    """One file of the distribution: its name, its number of records and the MD5 of its contents."""

    name: str
    records: int
    md5: str

    @property
    def size_bytes(self) -> int:
        """The exact size of the file."""
        return self.records * RECORD_BYTES


TRAIN_FILES = (
    BatchFile("data_batch_1.bin", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    BatchFile("data_batch_2.bin", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
    BatchFile("data_batch_3.bin", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    BatchFile("data_batch_4.bin", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    BatchFile("data_batch_5.bin", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
)
TEST_FILES = (BatchFile("test_batch.bin", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),)


def check_records(contents: bytes | np.ndarray, batch: BatchFile, where: object, remedy: str) -> None:
    """Checks size and MD5 of a batch file's contents.

    Args:
      contents: the bytes of the file, or a one-dimensional uint8 array of them.
      batch: what the file must be.
      where: what the message calls the file, usually its path.
      remedy: the last sentence of the message.

    Raises:
      DataError: the contents are not the published ones.

    Example:
      >>> zeros = np.zeros(2 * RECORD_BYTES, np.uint8)
      >>> check_records(zeros, BatchFile("two.bin", 3, ""), "two.bin", "Fetch it again.")
      Traceback (most recent call last):
      experiments.errors.DataError: two.bin: must have 9,219 bytes (3 records), has 6,146: truncated? Fetch it again.
    """
    size = len(contents)
    if size != batch.size_bytes:
        word = "truncated?" if size < batch.size_bytes else "not the binary version of CIFAR-10?"
        raise DataError(
            f"{where}: must have {batch.size_bytes:,} bytes ({batch.records:,} records), has {size:,}: {word} {remedy}"
        )
    md5 = hashlib.md5(np.frombuffer(contents, np.uint8).data, usedforsecurity=False).hexdigest()
    if md5 != batch.md5:
        raise DataError(f"{where}: must have the MD5 {batch.md5}, has {md5}: corrupted. {remedy}")


def decode_records(contents: bytes | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits records into images and labels.

    Args:
      contents: whole records, as bytes or a one-dimensional uint8 array.

    Returns:
      Images, uint8 of shape (records, 32, 32, 3: red, green, blue), and labels, int32 of shape (records,).

    Example:
      >>> images, labels = decode_records(bytes([7]) + bytes(1024) + bytes([255]) * 2048)
      >>> images.shape, images[0, 0, 0].tolist(), labels.tolist()
      ((1, 32, 32, 3), [0, 255, 255], [7])
    """
    records = np.frombuffer(contents, np.uint8).reshape(-1, RECORD_BYTES)
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, records[:, 0].astype(np.int32)


def encode_records(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The inverse of `decode_records`: a one-dimensional uint8 array of whole records.

    Example:
      >>> record = bytes([7]) + bytes(1024) + bytes([255]) * 2048
      >>> encode_records(*decode_records(record)).tobytes() == record
      True
    """
    pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1).reshape(-1)


def read_batches(folder: Path, files: Sequence[BatchFile]) -> tuple[np.ndarray, np.ndarray]:
    """Reads, checks and joins batch files of one folder.

    Args:
      folder: where the files lie.
      files: which files, in order, and what each must be.

    Returns:
      Images and labels as `decode_records` gives them.

    Raises:
      DataError: a file is missing, unreadable, or not the published one.
    """
    remedy = f"Fetch the data set's binary version again ({URL}) and unpack it."
    parts = []
    for batch in files:
        path = folder / batch.name
        try:
            contents = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            there = ", ".join(sorted(f.name for f in files if (folder / f.name).exists())) or "none"
            raise DataError(
                f"{path}: required ({batch.size_bytes:,} bytes) and missing; of its kind the folder has: {there}. {remedy}"
            ) from None
        except OSError as error:
            raise DataError(f"{path}: must be a readable file: {error.strerror or error}. {remedy}") from None
        check_records(contents, batch, path, remedy)
        parts.append(decode_records(contents))
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
