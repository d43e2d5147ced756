"""Image batches with labels: checking what a caller hands over, and loading sets by name or path.

Images outside a network are float tensors (N, C, H, W) in [0, 1]; labels are int64 tensors (N,).
"""

import gzip
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
    x = images if isinstance(images, Tensor) else torch.as_tensor(np.array(images))
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


def check_labels(labels: Any, count: int, num_classes: int | None = None) -> Tensor:
    """Labels as an int64 tensor (count,): from integer tensors, arrays, lists, (N, 1) columns or one-hot rows.

    Raises TypeError for other types, ValueError for another length or labels outside 0..num_classes-1.
    """
    y = labels if isinstance(labels, Tensor) else torch.as_tensor(np.array(labels))
    y = y.detach()
    if y.dim() == 2 and y.shape[1] > 1:
        hot = (y == 1).sum(1) == 1
        if not bool((hot & ((y != 0).sum(1) == 1)).all()):
            raise ValueError(f"expected (N,), (N, 1) or one-hot labels, got {tuple(y.shape)} that are not one-hot")
        if num_classes is not None and y.shape[1] != num_classes:
            raise ValueError(f"expected one-hot labels of {num_classes} classes, got {y.shape[1]} columns")
        y = y.argmax(1)
    elif y.dim() == 2:
        y = y[:, 0]
    if y.numel() and (y.is_floating_point() or y.dtype == torch.bool or y.is_complex()):
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
        raise ValueError(f"expected split 'test' or 'train', got {split!r}")
    path = Path(EMBEDDED.get(str(source), source))
    raw, labels = _reader(path, str(source))(path, split)
    images = _to_unit_range(_channels_first(raw))
    labels = check_labels(labels, len(images)).numpy()
    if len(images) == 0:
        raise ValueError(f"expected at least one image in {source}, got none: pass another file or folder")
    if limit is not None:
        order = balanced_order(labels)[:limit]
        images, labels = images[order], labels[order]
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
        if any(path.glob("*/*")):
            return _read_folder
    raise ValueError(
        f"expected {sorted(EMBEDDED)}, an .npz file or a folder of images, got {source!r}: check the name or path"
    )


def _read_npz(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
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
        data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
        shape = np.frombuffer(data, ">u4", axes, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape([int(n) for n in shape])

    return array("images", 3), array("labels", 1)


def _read_cifar10(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    files = sorted(path.glob("test_batch.bin" if split == "test" else "data_batch_*.bin"))
    data = b"".join(file.read_bytes() for file in files)
    if not data or len(data) % CIFAR10_RECORD:
        raise ValueError(f"expected whole CIFAR-10 records of {CIFAR10_RECORD} bytes in {path}, got {len(data)} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR10_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_folder(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    from PIL import Image

    classes = sorted(folder for folder in path.iterdir() if folder.is_dir())
    files = [(f, i) for i, c in enumerate(classes) for f in sorted(c.iterdir()) if f.suffix.lower() in SUFFIXES]
    pictures = []
    for file, _ in files:
        with Image.open(file) as picture:
            pictures.append(np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB")))
    shapes = {p.shape for p in pictures}
    if len(shapes) > 1:
        raise ValueError(f"expected pictures of one size and mode in {path}, got {sorted(shapes)}: resize them")
    labels = np.array([label for _, label in files], np.int64)
    return (np.stack(pictures) if pictures else np.zeros((0, 1, 1), np.uint8)), labels


def _channels_first(raw: NDArray[Any]) -> NDArray[Any]:
    if raw.ndim == 3:
        return raw[:, None]
    if raw.ndim == 4 and raw.shape[1] in (1, 3):
        return raw
    if raw.ndim == 4 and raw.shape[3] in (1, 3):
        return np.moveaxis(raw, 3, 1)
    raise ValueError(f"expected images (N, C, H, W), (N, H, W, C) or (N, H, W) with 1 or 3 channels, got {raw.shape}")


def _to_unit_range(raw: NDArray[Any]) -> NDArray[np.float32]:
    if raw.dtype == np.uint8:
        return raw.astype(np.float32) / np.float32(255)
    if not np.issubdtype(raw.dtype, np.floating):
        raise ValueError(f"expected uint8 or float images, got {raw.dtype}: store bytes or divide by the largest value")
    return check_images(np.ascontiguousarray(raw)).numpy().astype(np.float32)
