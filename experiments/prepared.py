"""CIFAR-10 as TensorFlow Datasets prepares it (tfrecord or array_record files), read without TensorFlow.

TFDS shuffles the images; each carries its place in the original order (`train_00042`), so the original order is restored here
and the same checksums hold as for the data set's own files. The files hold `tf.train.Example` messages with a PNG each
(format: https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

import io
import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.cifar_files import BatchFile, check_records, encode_records
from experiments.errors import DataError

REMEDY = "Prepare it again with TFDS, or give the folder of the data set's own binary files."


def find_prepared(directory: Path) -> Path | None:
    """The folder of a prepared CIFAR-10 in or below a TFDS data directory: the newest version, or None."""
    if (directory / "dataset_info.json").is_file():
        return directory
    found = [*directory.glob("cifar10/*/dataset_info.json"), *directory.glob("[0-9]*.[0-9]*.[0-9]*/dataset_info.json")]
    versions = [path.parent for path in found if re.fullmatch(r"\d+\.\d+\.\d+", path.parent.name)]
    return max(versions, key=lambda folder: tuple(map(int, folder.name.split("."))), default=None)


def read_prepared(folder: Path, split: str, files: Sequence[BatchFile]) -> tuple[np.ndarray, np.ndarray]:
    """Reads one split of a prepared CIFAR-10, in the data set's original order.

    Args:
      folder: the folder of one version, which holds `dataset_info.json`.
      split: `train` or `test`.
      files: the original files of that split, which the images must be equal to.

    Returns:
      Images, uint8 of shape (records, 32, 32, 3), and labels, int32 of shape (records,).

    Raises:
      DataError: the folder holds another data set or a format that is not read here, or it is incomplete or damaged.
    """
    file_format = _file_format(folder)
    shards = _shards(folder, split, file_format)
    try:
        from PIL import Image
        from tensorflow_datasets.proto import tf_example_pb2
    except ImportError as error:
        raise DataError(
            f"{folder}: reading a prepared TFDS directory needs tensorflow-datasets and pillow ({error}). "
            "Install them: pip install 'jaxremat[experiments]'"
        ) from None
    total = sum(batch.records for batch in files)
    images = np.zeros((total, 32, 32, 3), np.uint8)
    labels = np.zeros(total, np.int32)
    seen = np.zeros(total, bool)
    read = _READERS[file_format]
    parse = tf_example_pb2.Example.FromString  # pyright: ignore[reportAttributeAccessIssue]: made at import
    for shard in shards:
        for message in read(shard):
            try:
                feature = parse(message).features.feature
                name = feature["id"].bytes_list.value[0].decode()
                position = int(name.removeprefix(f"{split}_"))
                images[position] = np.asarray(Image.open(io.BytesIO(feature["image"].bytes_list.value[0])))
                labels[position] = feature["label"].int64_list.value[0]
                seen[position] = True
            except Exception as error:  # protobuf and pillow have many ways to refuse damaged bytes
                raise DataError(f"{shard}: holds a damaged or foreign record ({_brief(error)}). {REMEDY}") from None
    if not seen.all():
        raise DataError(f"{folder}: must have {total:,} {split} images, has {int(seen.sum()):,}. {REMEDY}")
    start = 0
    for batch in files:
        part = slice(start, start + batch.records)
        check_records(encode_records(images[part], labels[part]), batch, f"{folder}: what makes {batch.name}", REMEDY)
        start += batch.records
    return images, labels


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _file_format(folder: Path) -> str:
    path = folder / "dataset_info.json"
    try:
        info = json.loads(path.read_text())
        name, file_format = info["name"], info.get("fileFormat", "tfrecord")  # TFDS before 4.4 wrote tfrecord alone
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: must be TFDS's description of cifar10: {_brief(error)}. {REMEDY}") from None
    if name != "cifar10":
        raise DataError(
            f"{path}: must describe the data set 'cifar10', describes {name!r}. Give the folder of cifar10."
        )
    if file_format not in _READERS:
        raise DataError(
            f"{path}: must be in one of the formats {', '.join(_READERS)}, is in {file_format!r}. "
            "Prepare it in one of those: tfds.builder('cifar10', file_format='tfrecord').download_and_prepare()"
        )
    return file_format


def _shards(folder: Path, split: str, file_format: str) -> list[Path]:
    """The files of a split, complete by their own names: `cifar10-train.tfrecord-00000-of-00001`."""
    found = sorted(folder.glob(f"cifar10-{split}.{file_format}-*-of-*"))
    count = int(found[0].name.rsplit("-", 1)[1]) if found and found[0].name.rsplit("-", 1)[1].isdigit() else 1
    expected = [folder / f"cifar10-{split}.{file_format}-{i:05d}-of-{count:05d}" for i in range(count)]
    missing = [path for path in expected if path not in found]
    if missing:
        raise DataError(f"{missing[0]}: required and missing ({len(found)} of {count} files are there). {REMEDY}")
    return expected


def _read_tfrecord(path: Path) -> Iterator[bytes]:
    """The messages of a TFRecord file: each has its length (8 bytes), 4 bytes, the message, and 4 bytes.

    The 4 bytes are CRC-32C sums; they are not looked at, as the MD5 of the whole is.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: must be a readable file: {error.strerror or error}. {REMEDY}") from None
    with file:
        while head := file.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            # A record here is a PNG of 32 × 32 pixels; a length beyond this is damage, not a reason to ask for the memory.
            body = file.read(length + 4) if 0 < length < 1 << 20 else b""
            if len(body) != length + 4:
                raise DataError(f"{path}: ends within a record, or is not a TFRecord file: truncated? {REMEDY}")
            yield body[:-4]


def _read_array_record(path: Path) -> Iterator[bytes]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise DataError(
            f"{path}: reading array_record files needs the package array_record ({error}). "
            "Install it (pip install array_record), or prepare the data set with file_format='tfrecord'."
        ) from None
    try:
        reader = ArrayRecordReader(str(path))
        messages = reader.read_all()
        reader.close()
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        raise DataError(f"{path}: must be an array_record file: {_brief(error)}. {REMEDY}") from None
    yield from messages


_READERS = {"tfrecord": _read_tfrecord, "array_record": _read_array_record}
