"""Image batches with labels: checking what a caller hands over, and loading sets by name or path.

Images outside a network are float tensors (N, C, H, W) in [0, 1]; labels are int64 tensors (N,).
"""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {"fashion-mnist": ASSETS / "fashion-mnist-test.npz"}
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
CIFAR10_RECORD = 1 + 3 * 32 * 32
TOLERANCE = 1e-6


def check_images(images: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """Images as a floating tensor (N, C, H, W) in [0, 1], on the device they came on.

    images: tensor or array, float16 to float64. Values off by at most 1e-6 are clamped, the gradient passing through.
    shape: the (C, H, W) expected, if known. Raises TypeError for integers, ValueError for NaN, range or shape.
    """
    x = _as_tensor(images)
    if not x.is_floating_point():
        raise TypeError(f"expected floating point images in [0, 1], got {x.dtype}: divide by 255")
    if x.dim() != 4:
        raise ValueError(f"expected images of shape (N, C, H, W), got {tuple(x.shape)}: add or move axes")
    if shape is not None and tuple(x.shape[1:]) != tuple(shape):
        raise ValueError(
            f"expected images of shape (N, {', '.join(map(str, shape))}), got {tuple(x.shape)}: resize or move axes"
        )
    if x.numel() == 0:
        return x
    low, high = (float(v) for v in torch.aminmax(x.detach()))
    if not (low == low and high == high):
        raise ValueError("expected finite images in [0, 1], got NaN: clean the data first")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(f"expected images in [0, 1], got the range [{low:.6g}, {high:.6g}]: rescale them to [0, 1]")
    if low < 0 or high > 1:
        x = x + (x.detach().clamp(0, 1) - x.detach())
    return x


def _as_tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = np.array(values)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"expected numbers, got an array of {array.dtype}: convert it first")
    return torch.as_tensor(array.astype(array.dtype.newbyteorder("=")))


def check_labels(labels: Any, count: int, num_classes: int | None = None) -> Tensor:
    """Labels as an int64 tensor (count,): from integer tensors, arrays, lists, (N, 1) columns or one-hot rows.

    Raises TypeError for other types, ValueError for another length or labels outside 0..num_classes-1.
    """
    y = _as_tensor(labels).detach()
    if not (y.is_floating_point() or y.dtype == torch.bool or y.is_complex()):
        y = y.to(torch.int64)  # torch computes little with other unsigned types than bytes
    if y.dim() == 2 and y.shape[1] > 1:
        hot = (y == 1).sum(1) == 1
        if not bool((hot & ((y != 0).sum(1) == 1)).all()):
            raise ValueError(
                f"expected (N,), (N, 1) or one-hot labels, got {tuple(y.shape)} that are not: renumber them"
            )
        if num_classes is not None and y.shape[1] != num_classes:
            raise ValueError(
                f"expected one-hot labels of {num_classes} classes, got {y.shape[1]} columns: pass the classes"
            )
        y = y.to(torch.int64).argmax(1)
    elif y.dim() == 2:
        y = y[:, 0]
    if y.numel() and y.dtype != torch.int64:
        raise TypeError(f"expected integer labels, got {y.dtype}: convert them with .astype(int) or .long()")
    if y.dim() != 1 or len(y) != count:
        raise ValueError(f"expected {count} labels, one an image, got shape {tuple(y.shape)}: pass one label an image")
    y = y.to(torch.int64)
    if count and (int(y.min()) < 0 or (num_classes is not None and int(y.max()) >= num_classes)):
        top = "" if num_classes is None else f" to {num_classes - 1}"
        raise ValueError(f"expected labels from 0{top}, got the range [{int(y.min())}, {int(y.max())}]: renumber them")
    return y


def balanced_order(labels: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """Positions in a fixed, seeded order of which every prefix is class-balanced as far as the classes last."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members))
    return np.lexsort((labels, rank))


def load_images(source: str | Path, limit: int | None = None, split: str = "test") -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) float32 in [0, 1] and labels (N,) int64.

    source: "fashion-mnist" (1,000 embedded test images); an .npz with arrays images (uint8 or float in [0, 1], channels
    first or last, or none) and labels; a folder with one subfolder of pictures a class; a folder of Fashion-MNIST idx
    files; a folder of CIFAR-10 binary files. split: "test" or "train", where a folder holds both.
    limit: that many images in a fixed, seeded, class-balanced order.
    Raises ValueError when there is nothing to load or it is not what was expected; never unpickles anything.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"expected a limit of at least 1, got {limit}: leave it out for all images")
    if split not in ("test", "train"):
        raise ValueError(f"expected split 'test' or 'train', got {split!r}: pass one of them")
    path = Path(EMBEDDED.get(str(source), source))
    raw, labels = _reader(path, str(source))(path, split)
    images = _to_unit_range(_channels_first(raw))
    labels = check_labels(labels, len(images)).numpy()
    if len(images) == 0:
        raise ValueError(f"expected at least one image in {source}, got none: pass another file or folder")
    if limit is not None:
        # Embedded sets are stored in that order, of the whole test set, already.
        order = np.arange(len(labels)) if str(source) in EMBEDDED else balanced_order(labels)
        images, labels = images[order[:limit]], labels[order[:limit]]
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels)


Reader = Callable[[Path, str], tuple[NDArray[Any], NDArray[Any]]]


def _reader(path: Path, source: str) -> Reader:
    if path.is_file() and path.suffix == ".npz":
        return _read_npz
    if path.is_dir():
        if any(path.glob("*-ubyte*")):
            return _read_idx
        if any(path.glob("*_batch*.bin")):
            return _read_cifar10
        if any(folder.is_dir() for folder in path.iterdir()):
            return _read_folder
    raise ValueError(
        f"expected {sorted(EMBEDDED)}, an .npz file or a folder of images, got {source!r}: check the name or path"
    )


def _read_npz(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = {"images", "labels"} - set(archive.files)
            if missing:
                raise ValueError(f"expected arrays images and labels in {path}, got {archive.files}: rename them")
            return archive["images"], archive["labels"]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"expected plain arrays in {path}, got pickled objects, which are never loaded: save them as numbers"
            ) from error
        raise
    except Exception as error:
        raise ValueError(f"expected an .npz archive, got {path} ({error}): write it again with numpy.savez") from error


def _read_idx(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    prefix = "t10k" if split == "test" else "train"

    def array(kind: str, axes: int) -> NDArray[np.uint8]:
        found = sorted(path.glob(f"{prefix}-{kind}*-ubyte*"))
        if not found:
            raise ValueError(f"expected {prefix}-{kind}*-ubyte(.gz) in {path}, got none: check the folder")
        data = found[0].read_bytes()
        try:
            data = gzip.decompress(data) if found[0].suffix == ".gz" else data
            if data[:4] != bytes([0, 0, 8, axes]):
                raise ValueError(f"no idx header of unsigned bytes with {axes} axes")
            shape = np.frombuffer(data, ">u4", axes, 4)
            return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape([int(n) for n in shape])
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise ValueError(f"expected a whole idx file, got {found[0]} ({error}): download it again") from error

    return array("images", 3), array("labels", 1)


def _read_cifar10(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    files = sorted(path.glob("test_batch.bin" if split == "test" else "data_batch_*.bin"))
    data = b"".join(file.read_bytes() for file in files)
    if not data or len(data) % CIFAR10_RECORD:
        raise ValueError(
            f"expected whole CIFAR-10 records of {CIFAR10_RECORD} bytes in {path}, got {len(data)} bytes: check it"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR10_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_folder(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    path = path / split if (path / split).is_dir() else path
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    files = [(f, i) for i, c in enumerate(classes) for f in sorted(c.iterdir()) if f.suffix.lower() in SUFFIXES]
    pictures = [_read_picture(file) for file, _ in files]
    shapes = {p.shape for p in pictures}
    if len(shapes) > 1:
        raise ValueError(f"expected pictures of one size and mode in {path}, got {sorted(shapes)}: resize them")
    labels = np.array([label for _, label in files], np.int64)
    return (np.stack(pictures) if pictures else np.zeros((0, 1, 1), np.uint8)), labels


def _read_picture(file: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.mode[0] in "IF":
                raise ValueError(f"its mode {picture.mode} has more than 8 bits")
            return np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a picture of 8 bits a channel, got {file} ({error}): convert it") from error


def _channels_first(raw: NDArray[Any]) -> NDArray[Any]:
    if raw.ndim == 3:
        return raw[:, None]
    if raw.ndim == 4 and raw.shape[1] in (1, 3):
        return raw
    if raw.ndim == 4 and raw.shape[3] in (1, 3):
        return np.moveaxis(raw, 3, 1)
    raise ValueError(
        f"expected images (N, C, H, W), (N, H, W, C) or (N, H, W) with 1 or 3 channels, got {raw.shape}: move axes"
    )


def _to_unit_range(raw: NDArray[Any]) -> NDArray[np.float32]:
    if raw.dtype == np.uint8:
        return raw.astype(np.float32) / np.float32(255)
    if not np.issubdtype(raw.dtype, np.floating):
        raise ValueError(f"expected uint8 or float images, got {raw.dtype}: store bytes or divide by the largest value")
    return check_images(np.ascontiguousarray(raw)).numpy().astype(np.float32)
