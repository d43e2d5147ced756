import gzip
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import jem_robust as jr
from jem_robust.images import balanced_order, check_images, check_labels, load_images

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (12, 3, 4, 5), dtype=np.uint8)
LABELS = np.arange(12) % 3


def save(path, images=BYTES, labels=LABELS, **more):
    np.savez(path, images=images, labels=labels, **more)
    return path


@pytest.fixture
def npz(tmp_path):
    return tmp_path / "set.npz"


# Loading


def test_npz_of_bytes(npz):
    images, labels = jr.load_images(save(npz))
    assert (images.dtype, images.shape, labels.dtype) == (torch.float32, (12, 3, 4, 5), torch.int64)
    assert np.array_equal(images.numpy(), BYTES.astype(np.float32) / np.float32(255))
    assert images.is_contiguous()
    assert labels.tolist() == LABELS.tolist()
    assert torch.equal(load_images(str(npz))[0], images)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">f8"])
def test_npz_of_floats(npz, dtype):
    images, _ = load_images(save(npz, (BYTES / 255).astype(dtype)))
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, torch.from_numpy(BYTES / 255).float(), rtol=0, atol=1e-3)


def test_floats_off_by_rounding_are_clamped(npz):
    images, _ = load_images(save(npz, np.full((1, 1, 2, 2), 1 + 1e-7), [0]))
    assert images.max() == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_last_or_none_mean_the_same(npz, channels):
    first = BYTES[:, :channels]
    expected, _ = load_images(save(npz, first))
    assert torch.equal(load_images(save(npz, np.moveaxis(first, 1, 3)))[0], expected)
    if channels == 1:
        assert torch.equal(load_images(save(npz, first[:, 0]))[0], expected)


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (BYTES.astype(np.int64), LABELS, "uint8 or float"),
        (BYTES * 1.0, LABELS, r"\[0, 1\]"),
        (np.full((12, 1, 2, 2), np.nan), LABELS, "NaN"),
        (BYTES[:, :2], LABELS, "1 or 3 channels"),
        (BYTES[0, 0], LABELS, "1 or 3 channels"),
        (BYTES, LABELS[:5], "12 labels"),
        (BYTES, LABELS - 1, "labels from 0"),
        (BYTES[:0], LABELS[:0], "at least one image"),
    ],
)
def test_npz_that_holds_something_else_is_refused(npz, images, labels, text):
    with pytest.raises(ValueError, match=text):
        load_images(save(npz, images, labels))


def test_npz_with_other_names_is_refused(npz):
    np.savez(npz, x=BYTES, y=LABELS)
    with pytest.raises(ValueError, match="images and labels"):
        load_images(npz)


class Bomb:
    fired = False

    def __reduce__(self):
        return (setattr, (Bomb, "fired", True))


def test_pickles_are_refused_and_never_run(npz, tmp_path):
    save(npz, np.array([Bomb()] * 3, object), [0, 1, 2])
    with pytest.raises(ValueError, match="never loaded"):
        load_images(npz)
    save(npz, BYTES, np.array([Bomb()] * 12, object))
    with pytest.raises(ValueError, match="never loaded"):
        load_images(npz)
    npz.write_bytes(pickle.dumps({"images": Bomb()}))
    with pytest.raises(ValueError, match="npz"):
        load_images(npz)
    assert not Bomb.fired


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 cut short"])
def test_broken_archives_are_refused(npz, content):
    npz.write_bytes(content)
    with pytest.raises(ValueError, match="npz"):
        load_images(npz)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.mark.parametrize("names", ["{0}-images-idx3-ubyte{1}", "{0}-images.idx3-ubyte{1}"])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_fashion_mnist_folders(tmp_path, names, end):
    pack = gzip.compress if end else bytes
    for prefix, part in (("t10k", slice(0, 5)), ("train", slice(5, 12))):
        name = names.format(prefix, end)
        (tmp_path / name).write_bytes(pack(idx(BYTES[part, 0])))
        label = name.replace("images", "labels").replace("idx3", "idx1")
        (tmp_path / label).write_bytes(pack(idx(LABELS[part].astype(np.uint8))))
    images, labels = load_images(tmp_path)
    torch.testing.assert_close(images, torch.from_numpy(BYTES[:5, :1]) / 255)
    assert labels.tolist() == LABELS[:5].tolist()
    assert load_images(tmp_path, split="train")[0].shape == (7, 1, 4, 5)
    for broken in (pack(idx(BYTES[:5, 0]))[:-20], pack(idx(BYTES[:5, 0])[:6]), pack(idx(BYTES[:5])), b"", b"junk"):
        (tmp_path / names.format("t10k", end)).write_bytes(broken)
        with pytest.raises(ValueError, match="idx file"):
            load_images(tmp_path)


def test_half_a_fashion_mnist_folder_is_refused(tmp_path):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(BYTES[:, 0]))
    with pytest.raises(ValueError, match="t10k-labels"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="train-images"):
        load_images(tmp_path, split="train")


def test_cifar_binary_folders(tmp_path):
    pixels = RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    labels = np.array([3, 9, 0, 1, 2, 5], np.uint8)
    records = [bytes([label]) + picture.tobytes() for label, picture in zip(labels, pixels, strict=True)]
    (tmp_path / "test_batch.bin").write_bytes(b"".join(records[:2]))
    (tmp_path / "data_batch_1.bin").write_bytes(b"".join(records[2:4]))
    (tmp_path / "data_batch_2.bin").write_bytes(b"".join(records[4:]))
    images, got = load_images(tmp_path)
    torch.testing.assert_close(images, torch.from_numpy(pixels[:2]) / 255)
    assert got.tolist() == [3, 9]
    assert load_images(tmp_path, split="train")[1].tolist() == [0, 1, 2, 5]
    (tmp_path / "test_batch.bin").write_bytes(records[0][:-1])
    with pytest.raises(ValueError, match="CIFAR-10 records"):
        load_images(tmp_path)


def pictures(folder, mode="RGB", size=(5, 4)):
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            data = RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(data).convert(mode).save(folder / name / f"{i}.png")
        (folder / name / "notes.txt").write_text("no picture")
    return folder


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("RGBA", 3), ("P", 3), ("L", 1), ("LA", 1), ("1", 1)])
def test_folders_of_pictures(tmp_path, mode, channels):
    images, labels = load_images(pictures(tmp_path, mode))
    assert (images.shape, labels.tolist()) == ((4, channels, 4, 5), [0, 0, 1, 1])
    with Image.open(tmp_path / "dog" / "1.png") as picture:
        expected = np.asarray(picture.convert("RGB" if channels == 3 else "L")).reshape(4, 5, channels)
    torch.testing.assert_close(images[3], torch.from_numpy(expected.copy()).permute(2, 0, 1) / 255)


def test_folders_with_a_subfolder_per_split(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "test", "L")
    assert load_images(tmp_path)[0].shape == (4, 1, 4, 5)
    images, labels = load_images(tmp_path, split="train")
    assert (images.shape, labels.tolist()) == ((4, 3, 4, 5), [0, 0, 1, 1])


def test_hidden_folders_are_no_class(tmp_path):
    (pictures(tmp_path) / ".cache").mkdir()
    assert load_images(tmp_path)[1].tolist() == [0, 0, 1, 1]


def test_pictures_that_do_not_fit_are_refused(tmp_path):
    pictures(tmp_path)
    odd = tmp_path / "cat" / "z.png"
    Image.new("RGB", (9, 9)).save(odd)
    with pytest.raises(ValueError, match="one size"):
        load_images(tmp_path)
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(odd)
    with pytest.raises(ValueError, match="8 bits"):
        load_images(tmp_path)
    odd.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"z\.png"):
        load_images(tmp_path)


def test_nothing_to_load(tmp_path):
    for source in (tmp_path, tmp_path / "missing", tmp_path / "missing.npz", "no-such-set"):
        with pytest.raises(ValueError, match=r"fashion-mnist.*got"):
            load_images(source)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="at least one image"):
        load_images(tmp_path)


# Limits


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_is_balanced_as_far_as_the_classes_last(labels):
    labels = np.array(labels)
    order = balanced_order(labels)
    assert sorted(order) == list(range(len(labels)))
    total = np.bincount(labels, minlength=5)
    for n in range(1, len(labels) + 1):
        got = np.bincount(labels[order[:n]], minlength=5)
        unfinished = got[got < total]
        if unfinished.size:
            assert got.max() - unfinished.min() <= 1


def test_limits_are_prefixes_of_one_fixed_seeded_order(npz):
    many = RNG.integers(0, 256, (200, 1, 2, 2), dtype=np.uint8)
    labels = np.repeat(np.arange(10), 20)
    save(npz, many, labels)
    whole = load_images(npz, limit=200)
    for limit in (1, 7, 10, 100, 200, 999):
        images, y = load_images(npz, limit=limit)
        assert len(images) == min(limit, 200)
        assert torch.equal(images, whole[0][:limit])
        counts = torch.bincount(y, minlength=10)
        assert counts.max() - counts.min() <= 1
    assert torch.equal(load_images(npz)[1], torch.from_numpy(labels))
    assert balanced_order(labels)[:5].tolist() == balanced_order(labels)[:5].tolist()
    assert balanced_order(labels, 1).tolist() != balanced_order(labels).tolist()
    within = balanced_order(labels)[labels[balanced_order(labels)] == 0]
    assert within.tolist() != sorted(within.tolist())  # shuffled, not the file's order


def test_the_fixed_order_is_this_one():
    assert balanced_order(np.array([0, 0, 0, 1, 1, 1, 2, 2])).tolist() == FIXED


FIXED = [2, 4, 6, 0, 3, 7, 1, 5]


@pytest.mark.parametrize(
    ("kwargs", "text"), [({"limit": 0}, "limit"), ({"limit": -5}, "limit"), ({"split": "dev"}, "split")]
)
def test_bad_requests_are_refused(npz, kwargs, text):
    with pytest.raises(ValueError, match=text):
        load_images(save(npz), **kwargs)


# Checks


def test_good_images_pass_untouched():
    for x in (torch.rand(2, 1, 3, 3), torch.rand(2, 1, 3, 3).half(), torch.rand(2, 1, 3, 3).bfloat16()):
        assert check_images(x) is x
        assert check_images(x, (1, 3, 3)) is x
    assert check_images(torch.zeros(0, 1, 3, 3)).shape == (0, 1, 3, 3)


def test_arrays_are_copied():
    array = np.zeros((1, 1, 2, 2), np.float32)
    check_images(array)[:] = 1
    assert array.max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_is_a_millionth(dtype):
    x = torch.tensor([-1e-6, 1 + 1e-6, 0.0, 1.0], dtype=dtype).reshape(1, 1, 2, 2).requires_grad_()
    got = check_images(x)
    assert got.flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    got.sum().backward()
    assert (x.grad == 1).all()
    for bad in (-1.2e-6, 1 + 1.2e-6):
        with pytest.raises(ValueError, match=r"expected images in \[0, 1\], got the range"):
            check_images(torch.full((1, 1, 1, 1), bad, dtype=dtype))


def test_the_range_found_is_named():
    with pytest.raises(ValueError, match=r"\[-1, 2\.5\]"):
        check_images(torch.tensor([-1.0, 2.5]).reshape(1, 1, 1, 2))


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_every_integer_type_and_form(dtype):
    y = np.array([2, 0, 1], dtype)
    hot = np.eye(3, dtype=dtype)[[2, 0, 1]]
    for form in (y, y.tolist(), tuple(y), y[:, None], torch.as_tensor(y), hot, torch.as_tensor(hot), hot.tolist()):
        got = check_labels(form, 3, 3)
        assert (got.dtype, got.tolist()) == (torch.int64, [2, 0, 1])
    assert check_labels(y.astype(y.dtype.newbyteorder(">")), 3).tolist() == [2, 0, 1]


def test_one_hot_floats_and_bools_and_empty_labels():
    hot = torch.eye(4)[[3, 1]]
    for form in (hot, hot.double().numpy(), hot.bool(), hot.half()):
        assert check_labels(form, 2, 4).tolist() == [3, 1]
    for empty in ([], np.zeros(0), torch.zeros(0, dtype=torch.int64), np.zeros((0, 10)), np.zeros((0, 1), int)):
        assert check_labels(empty, 0).dtype == torch.int64


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        ([0.0, 1.0], TypeError, "integer labels"),
        (np.array([[0.0], [1.0]]), TypeError, "integer labels"),
        ([True, False], TypeError, "integer labels"),
        (["cat", "dog"], TypeError, "numbers"),
        (None, TypeError, "numbers"),
        ([0], ValueError, "2 labels"),
        (3, ValueError, "2 labels"),
        (np.zeros((2, 1, 1), int), ValueError, "2 labels"),
        ([[1, 1, 0], [1, 0, 0]], ValueError, "one-hot"),
        ([[0, 2, 0], [1, 0, 0]], ValueError, "one-hot"),
        (np.full((2, 3), np.nan), ValueError, "one-hot"),
        ([[1, 0], [0, 1]], ValueError, "3 classes"),
        ([0, 3], ValueError, "0 to 2"),
        ([0, -1], ValueError, "-1"),
    ],
)
def test_other_labels_are_refused(labels, error, text):
    with pytest.raises(error, match=text):
        check_labels(labels, 2, 3)
