"""The embedded sample: 1,000 + 500 real images of CIFAR-10, in its own binary format, compressed with xz.

The format needs neither pickle nor an image library, the reader of the full set reads it, and `xz -d` unpacks it for anyone
else. README.md beside this file says where the images come from.
"""

from pathlib import Path

import numpy as np

from experiments.cifar_files import BatchFile, check_records, decode_records
from experiments.errors import DataError

FOLDER = Path(__file__).parent
TRAIN = BatchFile("train.bin.xz", 1000, "9f57b9ed1a590ed440f44c8ed7bfca80")  # MD5 of the uncompressed contents
TEST = BatchFile("test.bin.xz", 500, "cde13d4fda8b222417a25a4728b716b0")


def read_part(batch: BatchFile, folder: Path = FOLDER) -> tuple[np.ndarray, np.ndarray]:
    """Reads and checks one part of the sample.

    Args:
      batch: `TRAIN` or `TEST`.
      folder: where the file lies.

    Returns:
      Images, uint8 of shape (records, 32, 32, 3), and labels, int32 of shape (records,).

    Raises:
      DataError: the file is missing or damaged, or this Python was built without xz.

    Example:
      >>> images, labels = read_part(TEST)
      >>> images.shape, labels[:10].tolist()
      ((500, 32, 32, 3), [3, 8, 8, 0, 6, 6, 1, 6, 3, 1])
    """
    remedy = "Restore the file from the repository, or install the package again."
    try:
        import lzma  # a Python built without liblzma lacks it, and needs it here alone
    except ImportError as error:
        raise DataError(f"the embedded sample needs Python's lzma module ({error}): use a Python that has it") from None
    path = folder / batch.name
    try:
        contents = lzma.decompress(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: must be a readable file: {error.strerror or error}. {remedy}") from None
    except lzma.LZMAError as error:
        raise DataError(f"{path}: must be an xz file of {batch.size_bytes:,} bytes: {error}. {remedy}") from None
    check_records(contents, batch, path, remedy)
    return decode_records(contents)
