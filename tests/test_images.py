"""Image sets against files made here byte by byte, against published facts, and against scikit-learn's own digits."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits

from unnorm.data import Compose, Dequantize, ImageRows, Logit, image_data, images, labelled_images
from unnorm.data.formats import cifar_records, folder_of_images, packed, svhn_matrix
from unnorm.errors import DataError, InvalidValue


def pictures(n=6, seed=0, side=32):
    """Smooth colours with noise, as photographs are."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, side)[:, None] * np.linspace(0.2, 1, side)
    return (ramp + rng.integers(0, 56, (n, 3, side, side))).astype(np.uint8)


def residuals(array):
    """The packed form of (n, 3, height, width), written from its description."""
    red, green, blue = (array[:, place].astype(int) for place in range(3))
    planes = np.stack([green, (red - green + 128) % 256, (blue - green + 128) % 256])
    found = np.zeros_like(planes)
    for i in range(array.shape[2]):
        for j in range(array.shape[3]):
            a = planes[:, :, i, j - 1] if j else None
            b = planes[:, :, i - 1, j] if i else None
            if a is None and b is None:
                guess = 128
            elif a is None or b is None:
                guess = a if b is None else b
            else:
                guess = np.median([a, b, a + b - planes[:, :, i - 1, j - 1]], axis=0).astype(int)
            found[:, :, i, j] = (planes[:, :, i, j] - guess) % 256
    return found.astype(np.uint8)


class TestFormats:
    def test_packed_images_come_back(self, tmp_path):
        array, labels = pictures(), np.arange(6, dtype=np.uint8)
        np.savez_compressed(tmp_path / "a.npz", res=residuals(array), labels=labels, coarse=labels // 2)
        found = packed(tmp_path / "a.npz")
        np.testing.assert_array_equal(found.images, array)
        own, both = cifar_records(found.records(), 2)
        np.testing.assert_array_equal(own, array)
        assert both.tolist() == [[k // 2, k] for k in range(6)]

    @pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
    def test_broken_packed_files(self, tmp_path, content):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match="'a.npz' is not a file of packed images"):
            packed(tmp_path / "a.npz")

    def test_packed_arrays_of_another_kind(self, tmp_path):
        np.savez(tmp_path / "a.npz", res=np.zeros((3, 4)))
        with pytest.raises(DataError, match="must hold bytes 'res'"):
            packed(tmp_path / "a.npz")

    def test_records_of_cifar(self):
        array = pictures()
        content = b"".join(bytes([k]) + array[k].tobytes() for k in range(6))
        found, labels = cifar_records(content, 1)
        np.testing.assert_array_equal(found, array)
        assert labels[:, 0].tolist() == list(range(6))
        with pytest.raises(DataError, match=r"3,073 bytes each. Got 18,437 bytes"):
            cifar_records(content[:-1], 1)

    def test_matrices_of_svhn(self):
        array, labels = pictures(), np.array([1, 10, 3, 10, 5, 9], np.uint8)
        target = io.BytesIO()
        savemat(target, {"X": array.transpose(2, 3, 1, 0), "y": labels[:, None]})
        found, own = svhn_matrix(target.getvalue(), "a.mat")
        np.testing.assert_array_equal(found, array)
        assert own.tolist() == [1, 0, 3, 0, 5, 9]
        for content in (b"", b"no matrix" * 100, target.getvalue()[:5000]):
            with pytest.raises(DataError, match=r"'a.mat' is not a file of SVHN's digits"):
                svhn_matrix(content, "a.mat")

    def test_folders(self, tmp_path):
        array = pictures(4, side=8)
        for k, kind in enumerate(["cat", "cat", "dog", "dog"]):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.fromarray(array[k].transpose(1, 2, 0)).save(tmp_path / kind / f"{k}.png")
        (tmp_path / "notes.txt").write_text("no image")
        found, labels = folder_of_images(tmp_path)
        np.testing.assert_array_equal(found, array)
        assert labels.tolist() == [0, 0, 1, 1]
        assert folder_of_images(tmp_path, (4, 6))[0].shape == (4, 3, 4, 6)
        parts = [labelled_images(str(tmp_path), part).images for part in ("train", "test")]
        assert [len(part) for part in parts] == [3, 1]

    def test_a_folder_that_is_not_divided_is(self, tmp_path):
        """No image is in two parts, all are in one, and always in the same."""
        for place in range(40):
            Image.fromarray(np.full((4, 4), place, np.uint8)).save(tmp_path / f"{place:02d}.png")
        found = image_data(str(tmp_path))
        parts = [set(getattr(found, part).images.flatten(1)[:, 0].tolist()) for part in ("train", "validation", "test")]
        assert [len(part) for part in parts] == [33, 3, 4]
        assert set.union(*parts) == set(range(40))
        again = image_data(str(tmp_path))
        assert torch.equal(again.test.images, found.test.images)
        (tmp_path / "train").mkdir()
        (tmp_path / "00.png").rename(tmp_path / "train" / "00.png")
        with pytest.raises(DataError, match="has a folder 'train' and none for 'test'"):
            image_data(str(tmp_path))

    def test_folders_of_grey_images_keep_one_channel(self, tmp_path):
        array = pictures(3, side=5)[:, 0]
        for k in range(3):
            Image.fromarray(array[k]).save(tmp_path / f"{k}.png")
        found, _ = folder_of_images(tmp_path)
        np.testing.assert_array_equal(found[:, 0], array)
        assert found.shape == (3, 1, 5, 5)

    def test_folders_that_cannot_be_read(self, tmp_path):
        with pytest.raises(DataError, match="There are no images"):
            folder_of_images(tmp_path)
        Image.fromarray(pictures(1, side=4)[0, 0]).save(tmp_path / "a.png")
        Image.fromarray(pictures(1, side=5)[0, 0]).save(tmp_path / "b.png")
        with pytest.raises(DataError, match=r"differ in size \(\(4, 4\) and \(5, 5\)\)"):
            folder_of_images(tmp_path)
        (tmp_path / "b.png").write_bytes(b"\x89PNG broken")
        with pytest.raises(DataError, match=r"b.png' is no image that can be read"):
            folder_of_images(tmp_path)


class TestSets:
    def test_an_archive_of_cifar(self, tmp_path, monkeypatch):
        """Read where it is; a wrong byte in the archive or in a file of it is noticed."""
        array = pictures()
        content = b"".join(bytes([3, k]) + array[k].tobytes() for k in range(6))
        with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo("cifar-100-binary/test.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        with pytest.raises(DataError, match=r"'cifar-100-binary.tar.gz' is damaged or not the published file"):
            labelled_images("cifar100", "test", tmp_path)
        own = images.Published("cifar-100-binary.tar.gz", "", _md5((tmp_path / "cifar-100-binary.tar.gz").read_bytes()))
        monkeypatch.setattr(images, "CIFAR100", own)
        with pytest.raises(DataError, match=r"'test.bin' is damaged or not the published file"):
            labelled_images("cifar100", "test", tmp_path)
        monkeypatch.setitem(images.CIFAR100_FILES, "test.bin", _md5(content))
        found = labelled_images("cifar100", "test", tmp_path)
        np.testing.assert_array_equal(found.images, array)
        assert found.labels.tolist() == list(range(6))

    def test_what_is_missing_is_said(self, tmp_path):
        for name in ("fashion-mnist", "cifar10", "cifar100", "svhn"):
            with pytest.raises(DataError, match=r"There is no '.*' in .*download=True"):
                labelled_images(name, "train", tmp_path)
        with pytest.raises(InvalidValue, match="Unknown set of images 'cifar'. Did you mean"):
            labelled_images("cifar")
        with pytest.raises(InvalidValue, match="is train or test"):
            labelled_images("mnist", "validation")

    def test_digits_are_scikit_learns(self):
        data = image_data("digits", seed=3)
        parts = [data.train, data.validation, data.test]
        assert data.event == (1, 8, 8)
        found = np.concatenate([part.images.flatten(1).numpy() for part in parts])
        expected = load_digits().data.astype(np.uint8)
        assert sorted(map(bytes, found)) == sorted(map(bytes, expected))
        again = image_data("digits", seed=3)
        assert torch.equal(again.validation.images, data.validation.images)
        assert not torch.equal(image_data("digits", seed=4).validation.images, data.validation.images)
        with pytest.raises(InvalidValue, match="must leave some of the 1497 images"):
            image_data("digits", validation=1497)

    @pytest.mark.parametrize(
        ("name", "facts"),
        [
            ("cifar10", {"counts": [1000] * 10, "means": (0.4942, 0.4851, 0.4504)}),
            ("cifar100", {"counts": [100] * 100, "means": (0.5088, 0.4874, 0.4419)}),
            ("svhn", {"counts": [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]}),
        ],
    )
    def test_the_real_ones(self, real_data, name, facts):
        """Counts of classes and means of channels, as published."""
        if not (real_data / "packed" / f"{name}_test.npz").is_file():
            pytest.skip(f"UNNORM_DATA has no packed/{name}_test.npz")
        found = labelled_images(name, "test")
        assert torch.bincount(found.labels.long()).tolist() == facts["counts"]
        if "means" in facts:
            means = found.images.double().mean((0, 2, 3)) / 255
            np.testing.assert_allclose(means, facts["means"], atol=2e-4)


def test_packed_digits_of_svhn_are_checked(tmp_path):
    (tmp_path / "packed").mkdir()
    np.savez_compressed(
        tmp_path / "packed" / "svhn_test.npz", res=residuals(pictures()), labels=np.arange(6, dtype=np.uint8)
    )
    with pytest.raises(DataError, match=r"'svhn_test.npz' is damaged or not the published file"):
        labelled_images("svhn", "test", tmp_path)


class TestRows:
    def test_bytes_are_dequantised_anew(self):
        bytes_ = torch.from_numpy(pictures())
        rows = ImageRows(bytes_, Dequantize(256), generator=torch.Generator().manual_seed(0))
        index = torch.tensor([4, 1])
        first, second = rows[index], rows[index]
        assert first.dtype == torch.float32
        assert not torch.equal(first, second)
        for found in (first, second):
            assert torch.equal((found.double() * 256).floor().to(torch.uint8), bytes_[index])

    def test_a_longer_transform_leads_back_to_the_bytes(self):
        data = image_data("digits")
        transform = Compose([Dequantize(17), Logit(1e-6)])
        z = data.rows("test", transform, generator=torch.Generator().manual_seed(0))[torch.arange(10)]
        assert z.abs().max() > 1
        found = transform.inverse(z.double()).floor().to(torch.uint8)
        assert (found == data.test.images[:10]).double().mean() > 0.999  # float32 rounds a few across an edge
        with pytest.raises(InvalidValue, match="Unknown part 'tset'. Did you mean 'test'"):
            data.rows("tset")


def _md5(content):
    import hashlib

    return hashlib.md5(content).hexdigest()


class TestShifts:
    def rows(self, shift, n=400):
        image = torch.zeros(1, 2, 5, 4, dtype=torch.uint8)
        image[0, 0, 2, 1], image[0, 1, 3, 2] = 10, 20
        images = image.expand(n, -1, -1, -1).contiguous()
        rows = ImageRows(images, Dequantize(256), generator=torch.Generator().manual_seed(0), shift=shift)
        return (rows[torch.arange(n)] * 256).floor()

    def test_each_image_moves_by_itself_and_as_a_whole(self):
        found = self.rows(1)
        places = [tuple((channel > 5).nonzero()[0].tolist()) for channel in found[:, 0]]
        assert set(places) == {(2 + i, 1 + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
        for image, (i, j) in zip(found, places, strict=True):
            assert image[1, i + 1, j + 1] == 20  # the other channel with it
            assert int((image > 0).sum()) == 2
        counts = np.unique(places, axis=0, return_counts=True)[1]
        assert counts.min() > 20  # of 400, nine places: 44 each

    def test_what_leaves_is_gone_and_what_comes_in_is_zero(self):
        found = self.rows(3)
        assert int((found > 0).flatten(1).sum(1).min()) < 2
        assert set(found.unique().tolist()) == {0.0, 10.0, 20.0}

    def test_none_changes_nothing(self):
        assert torch.equal(self.rows(0)[0, 0].nonzero(), torch.tensor([[2, 1]]))

    def test_wrong_use(self):
        with pytest.raises(InvalidValue, match="'shift' of ImageRows must not be negative"):
            self.rows(-1)
