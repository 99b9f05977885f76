"""What an image folder holds is what is trained: every kind of file by its pixels in closed form, or one sentence.

Expected pixels are arrays of NumPy, made before any file is; Pillow only writes the files.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from fedsign.config import from_dict
from fedsign.data.base import Dataset, LazySamples, features_of
from fedsign.data.images.image_folder import image_folder
from fedsign.errors import DataError, FedSignError
from fedsign.workload import Workload

SIZE = 6
RNG = np.random.default_rng(0)
GRAY8 = RNG.integers(256, size=(SIZE, SIZE), dtype=np.uint8)
GRAY16 = RNG.integers(2**16, size=(SIZE, SIZE), dtype=np.uint16)
GRAY12 = RNG.integers(2**12, size=(SIZE, SIZE), dtype=np.uint16)
COLOR = RNG.integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)
ALPHA = np.kron(np.array([[0, 255], [128, 64]], np.uint8), np.ones((SIZE // 2, SIZE // 2), np.uint8))
FRACTIONS = RNG.uniform(size=(SIZE, SIZE)).astype(np.float32)
INDICES = RNG.integers(4, size=(SIZE, SIZE), dtype=np.uint8)
PALETTE = np.array([[10, 20, 30], [200, 100, 0], [0, 255, 7], [99, 98, 97]], np.uint8)
Array = Any


def gray(values: Array) -> Array:
    """[H, W] as three equal channels [3, H, W]."""
    return np.repeat(np.asarray(values, np.float64)[None], 3, axis=0)


def color(values: Array) -> Array:
    """[H, W, 3] as fractions [3, H, W]."""
    return np.asarray(values, np.float64).transpose(2, 0, 1) / 255


def over_white(values: Array, alpha: Array) -> Array:
    share = alpha[..., None] / 255
    return color(share * values + (1 - share) * 255)


def save(**options: Any) -> Callable[[Array, Path], None]:
    return lambda values, path: Image.fromarray(values).save(path, **options)


def save_as(mode: str) -> Callable[[Array, Path], None]:
    return lambda values, path: Image.fromarray(values).convert(mode).save(path)


def save_palette(values: Array, path: Path, **options: Any) -> None:
    image = Image.fromarray(values).convert("P")
    image = Image.frombytes("P", (SIZE, SIZE), values.tobytes())
    image.putpalette(PALETTE.ravel().tolist())
    image.save(path, **options)


def save_pgm(values: Array, path: Path, largest: int) -> None:
    path.write_bytes(f"P5 {SIZE} {SIZE} {largest}\n".encode() + values.astype(">u2").tobytes())


def tiff_of(values: Array, *, bits: int, photometric: int = 1, sample_format: int = 1) -> bytes:
    """A little-endian TIFF of one strip, by the specification: header, pixels, one directory of ten entries."""
    strip = values.tobytes()
    tags = [
        *((256, SIZE), (257, SIZE), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1)),
        *((278, SIZE), (279, len(strip)), (339, sample_format)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return struct.pack("<2sHI", b"II", 42, 8 + len(strip)) + strip + struct.pack("<H", len(tags)) + entries + bytes(4)


def tiff(**tags: int) -> Callable[[Array, Path], None]:
    return lambda values, path: path.write_bytes(tiff_of(values, **tags)) and None


def packed_12(values: Array) -> Array:
    """Rows of 12-bit values, two in three bytes."""
    a, b = values[:, ::2].astype(np.uint16), values[:, 1::2].astype(np.uint16)
    rows = np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], axis=-1)
    return rows.astype(np.uint8).reshape(SIZE, -1)


RGB16 = RNG.integers(2**16, size=(SIZE, SIZE, 3), dtype=np.uint16)


def save_rgb16(values: Array, path: Path) -> None:
    """A PNG of 16 bits per color, by the specification; Pillow writes none."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIZE, SIZE, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


# suffix, values, writer, expected pixels [3, H, W], how it was read
KINDS: dict[str, tuple[str, Array, Callable[[Array, Path], Any], Array, str]] = {
    "8-bit gray": (".png", GRAY8, save(), gray(GRAY8 / 255), "8 bits (divided by 255)"),
    "8-bit color": (".png", COLOR, save(), color(COLOR), "8 bits (divided by 255)"),
    "16-bit PNG": (".png", GRAY16, save(), gray(GRAY16 / 65535), "16 bits (divided by 65,535)"),
    "12 bits in a 16-bit PNG": (".png", GRAY12, save(), gray(GRAY12 / 65535), "16 bits (divided by 65,535)"),
    "16-bit TIFF": (".tif", GRAY16, save(), gray(GRAY16 / 65535), "16 bits (divided by 65,535)"),
    "16-bit TIFF, LZW": (".tif", GRAY16, save(compression="tiff_lzw"), gray(GRAY16 / 65535), "16 bits (divided"),
    "16-bit TIFF, big-endian": (".tiff", GRAY16.astype(">u2"), save(), gray(GRAY16 / 65535), "16 bits (divided"),
    "16-bit TIFF, white is zero": (
        *(".tif", GRAY16, tiff(bits=16, photometric=0)),
        *(gray(1 - GRAY16 / 65535), "16 bits (divided by 65,535)"),
    ),
    "8-bit TIFF, white is zero": (".tif", GRAY8, tiff(bits=8, photometric=0), gray(1 - GRAY8 / 255), "8 bits"),
    "12-bit TIFF": (".tif", packed_12(GRAY12), tiff(bits=12), gray(GRAY12 / 4095), "12 bits (divided by 4,095)"),
    "16-bit PGM": (".pgm", GRAY16, lambda v, p: save_pgm(v, p, 65535), gray(GRAY16 / 65535), "16 bits (divided"),
    "float TIFF": (".tif", FRACTIONS, save(), gray(FRACTIONS), "floats (taken as they are)"),
    "16 bits per color": (".png", RGB16, save_rgb16, color(RGB16 // 256), "16 bits per color (of which the upper 8"),
    "1 bit": (".png", GRAY8 > 99, save(), gray(GRAY8 > 99), "8 bits"),
    "palette": (".png", INDICES, save_palette, color(PALETTE[INDICES]), "8 bits"),
    "palette in a GIF": (".gif", INDICES, save_palette, color(PALETTE[INDICES]), "8 bits"),
    "palette with transparency": (
        *(".png", INDICES, lambda v, p: save_palette(v, p, transparency=bytes([255, 0, 51, 255]))),
        over_white(PALETTE[INDICES], np.array([255, 0, 51, 255])[INDICES]),
        "laid over white (alpha channel or transparent color)",
    ),
    "CMYK": (
        ".tif",
        255 - COLOR,
        lambda v, p: Image.fromarray(255 - v).convert("CMYK").save(p),
        color(COLOR),
        "8 bits",
    ),
    "alpha": (".png", np.dstack([COLOR, ALPHA]), save(), over_white(COLOR, ALPHA), "laid over white"),
    "content in the alpha channel": (
        *(".png", np.dstack([0 * COLOR, ALPHA]), save()),
        *(gray(1 - ALPHA / 255), "laid over white"),
    ),
    "gray with alpha": (
        *(".png", np.dstack([GRAY8, ALPHA]), save()),
        *(over_white(np.dstack([GRAY8] * 3), ALPHA), "laid over white"),
    ),
    "a transparent 16-bit value": (
        *(".png", GRAY16, lambda v, p: Image.fromarray(v).save(p, transparency=int(GRAY16[0, 0]))),
        *(gray(np.where(GRAY16[0, 0] == GRAY16, 1, GRAY16 / 65535)), "laid over white"),
    ),
    "an opaque alpha channel": (
        ".webp",
        np.dstack([COLOR, ALPHA * 0 + 255]),
        save(lossless=True),
        color(COLOR),
        "8 bits",
    ),
    ".jfif": (".jfif", GRAY8 * 0 + 77, save(format="JPEG"), gray(GRAY8 * 0 + 77 / 255), "8 bits"),
}


def folder(root: Path, write: Callable[[Path], Any], *, suffix: str = ".png", num: int = 2) -> Path:
    for name in "ab":
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            write(root / name / f"{number}{suffix}")
    return root


def pixels(root: Path, **settings: Any) -> Array:
    data = image_folder(0, root=str(root), **{"size": SIZE, "test_fraction": 0.5, **settings})
    return torch.cat([data.train.features, data.test.features]).double().numpy()


@pytest.mark.parametrize("in_memory", ["always", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_that_were_written_and_the_page_says_how_they_were_read(
    tmp_path: Path, kind: str, in_memory: Any
) -> None:
    """In closed form to half a step of 1/255 where Pillow mixes bytes with white, else to float32."""
    suffix, values, write, expected, words = KINDS[kind]
    folder(tmp_path, lambda path: write(values, path), suffix=suffix)
    data = image_folder(0, root=str(tmp_path), size=SIZE, test_fraction=0.5, in_memory=in_memory)
    tolerance = 0.502 / 255 if "white" in words else 1e-6
    for image in torch.cat([data.train.features, data.test.features]).double().numpy():
        np.testing.assert_allclose(image, expected, atol=tolerance, rtol=0)
    assert words in " ".join(data.read_as) and "4 images" in data.read_as[0]


@pytest.mark.parametrize("kind", ["16-bit PNG", "float TIFF", "8-bit gray", "content in the alpha channel"])
def test_one_channel_holds_what_three_hold(tmp_path: Path, kind: str) -> None:
    suffix, values, write, expected, _ = KINDS[kind]
    folder(tmp_path, lambda path: write(values, path), suffix=suffix)
    found = pixels(tmp_path, channels=1)
    assert found.shape == (4, 1, SIZE, SIZE)
    np.testing.assert_allclose(found[0], expected[:1], atol=0.502 / 255, rtol=0)


TURNS: dict[int, Callable[[Array], Array]] = {  # what a viewer does, by the EXIF specification
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: np.rot90(image, 2).swapaxes(0, 1),
    8: lambda image: np.rot90(image, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
def test_a_photograph_is_turned_as_its_exif_orientation_says(tmp_path: Path, orientation: int, suffix: str) -> None:
    """Once: Pillow turns a TIFF by itself."""
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if suffix == ".webp" else {}
    folder(tmp_path, lambda path: Image.fromarray(COLOR).save(path, exif=exif, **options), suffix=suffix)
    data = image_folder(0, root=str(tmp_path), size=SIZE, test_fraction=0.5)
    np.testing.assert_allclose(data.train.features[0], color(TURNS[orientation](COLOR)), atol=1e-6)
    assert ("all turned upright (EXIF orientation)" in data.read_as[0]) == (orientation > 1)


def test_a_16_bit_image_is_scaled_and_cropped_like_one_of_8_bits(tmp_path: Path) -> None:
    """The same picture in both depths differs by the rounding of the bytes alone, also after interpolation."""
    large = np.kron(GRAY8, np.ones((5, 7), np.uint8))
    folder(tmp_path / "8", lambda path: Image.fromarray(large).save(path))
    folder(tmp_path / "16", lambda path: Image.fromarray(large.astype(np.uint16) * 257).save(path))
    np.testing.assert_allclose(pixels(tmp_path / "8"), pixels(tmp_path / "16"), atol=1 / 255)


def test_mixed_depths_share_one_scale_and_are_a_warning(tmp_path: Path) -> None:
    """255 * 257 = 65535: a byte and its 16-bit form are the same fraction."""
    folder(tmp_path, lambda path: Image.fromarray(GRAY8).save(path))
    Image.fromarray(GRAY8.astype(np.uint16) * 257).save(tmp_path / "b" / "1.png")
    data = image_folder(0, root=str(tmp_path), size=SIZE, test_fraction=0.5)
    assert "3 of 8 bits (divided by 255), 1 of 16 bits (divided by 65,535)" in data.read_as[0]
    (note,) = data.notes
    assert "different depths are mixed" in note and "save all of them alike" in note
    assert float(data.train.features.sub(data.test.features).abs().max()) < 1e-6


def several(path: Path, num: int = 3) -> None:
    first, *more = (Image.fromarray(RNG.integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)) for _ in range(num))
    first.save(path, save_all=True, append_images=more)


def bigger(values: Array) -> Callable[[Path], None]:
    return lambda path: Image.fromarray(values).save(path)


@pytest.mark.parametrize("in_memory", ["always", "never"])
@pytest.mark.parametrize(
    ("suffix", "write", "words"),
    [
        (".tif", several, "holds 3 pages or frames; expected one"),
        (".gif", several, "holds 3 pages or frames; expected one"),
        (".png", several, "holds 3 pages or frames; expected one"),
        (".webp", several, "holds 3 pages or frames; expected one"),
        (".tif", bigger(FRACTIONS * 2000 - 1000), "expected fractions from 0 to 1"),
        (".tif", bigger(np.where(FRACTIONS > 0.5, np.float32(np.nan), FRACTIONS)), "expected fractions from 0 to 1"),
        (".tif", bigger(GRAY16.astype(np.int32)), "signed or 32-bit integers; expected 8 or 16 bits"),
        (".tif", lambda path: path.write_bytes(tiff_of(GRAY16, bits=16, sample_format=2)), "signed or 32-bit integers"),
        (".png", lambda path: path.write_bytes(b""), "cannot be read"),
        (".jpg", lambda path: path.write_text("<html>404</html>"), "cannot be read"),
        (".png", lambda path: path.symlink_to("nowhere.png"), "cannot be read"),
    ],
    ids=["tiff", "gif", "apng", "webp", "range", "nan", "int32", "int16", "empty", "html", "dead link"],
)
def test_what_has_no_one_meaning_is_refused_by_the_name_of_the_file(
    tmp_path: Path, suffix: str, write: Callable[[Path], Any], words: str, in_memory: Any
) -> None:
    folder(tmp_path, lambda path: Image.fromarray(COLOR).save(path))
    write(tmp_path / "b" / f"odd{suffix}")
    with pytest.raises(DataError, match=rf"the image \S+odd\{suffix} .*{words}.*remove it\.$"):
        pixels(tmp_path, in_memory=in_memory)


def test_a_photograph_with_a_preview_is_its_first_picture(tmp_path: Path) -> None:
    small = Image.new("RGB", (2, 2))
    folder(
        tmp_path,
        lambda path: Image.new("RGB", (SIZE, SIZE), (9, 9, 9)).save(path, "MPO", save_all=True, append_images=[small]),
        suffix=".jpg",
    )
    data = image_folder(0, root=str(tmp_path), size=SIZE, test_fraction=0.5)
    assert torch.equal(data.train.features * 255, torch.full((2, 3, SIZE, SIZE), 9.0))
    assert "all the first of several pictures in a file (MPO)" in data.read_as[0]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".gif", ".webp", ".bmp"])
def test_a_damaged_file_is_read_or_is_one_sentence(tmp_path: Path, suffix: str) -> None:
    """Cut anywhere, or with bytes changed in its first half: an error of Pillow's own type never comes through."""
    folder(tmp_path, lambda path: Image.fromarray(COLOR).save(path), suffix=suffix)
    path, random = tmp_path / "b" / f"0{suffix}", np.random.default_rng(0)
    whole = path.read_bytes()
    refused = 0
    for trial in range(40):
        damaged = bytearray(whole[: random.integers(len(whole))] if trial % 2 else whole)
        for position in random.integers(max(1, len(damaged) // 2), size=0 if trial % 2 else 3):
            damaged[position : position + 1] = random.bytes(1)
        path.write_bytes(damaged)
        try:
            pixels(tmp_path)
        except FedSignError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused >= 10


def listed(root: Path, **settings: Any) -> Dataset:
    return image_folder(0, root=str(root), size=SIZE, test_fraction=0.5, **settings)


@pytest.mark.parametrize("class_names", [(), ("b", "a", "c")])
def test_hidden_and_system_files_and_folders_are_no_classes_and_no_images(
    tmp_path: Path, class_names: tuple[str, ...]
) -> None:
    folder(tmp_path, bigger(COLOR))
    for hidden in (".ipynb_checkpoints", "__MACOSX", "a/.ipynb_checkpoints", "@eaDir", "b/__MACOSX"):
        folder(tmp_path / hidden, bigger(COLOR))
    for hidden in ("a/._0.png", "b/.0.png.swp"):
        (tmp_path / hidden).write_bytes(b"no image")
    for hidden in (".DS_Store", "a/.DS_Store", "b/Thumbs.db", "b/desktop.ini"):
        (tmp_path / hidden).write_bytes(b"no image")
    data = listed(tmp_path, class_names=class_names)
    assert data.class_names == (class_names or ("a", "b")) and len(data.train) + len(data.test) == 4
    assert data.read_as[1:] == ("left out: 11 hidden or system files and folders",)


def test_files_that_are_not_read_are_counted_by_extension(tmp_path: Path) -> None:
    folder(tmp_path, bigger(COLOR))
    for name in ("a/0.heic", "a/1.HEIC", "b/0.jp2", "b/notes.txt", "b/README"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "labels.csv").write_bytes(b"x")
    (sentence,) = listed(tmp_path).read_as[1:]
    assert sentence.startswith("left out: 2 .heic, ")
    for words in ("1 .jp2", "1 .txt", "1 without an extension", "1 beside the class folders"):
        assert words in sentence


def test_linked_duplicates_are_left_out_and_links_to_elsewhere_are_read(tmp_path: Path) -> None:
    """`c` links to class `a` (3 files), `d` holds a link to a file of `b`, `a` and `f` one to a file of their own."""
    root, store = tmp_path / "data", tmp_path / "store"
    folder(root, bigger(COLOR))
    folder(store, bigger(255 - COLOR))
    (root / "c").symlink_to("a")
    (root / "d").mkdir()
    (root / "d" / "0.png").symlink_to("../b/0.png")
    (root / "a" / "again.png").symlink_to("0.png")
    (root / "a" / "around").symlink_to("..")
    (root / "e").symlink_to(store / "a")
    (root / "f").mkdir()
    (root / "f" / "link.png").symlink_to(store / "b" / "0.png")
    (root / "f" / "twice.png").symlink_to(store / "b" / "0.png")
    data = listed(root)
    assert data.class_names == ("a", "b", "e", "f")
    counts = torch.bincount(torch.cat([data.train.targets, data.test.targets])).tolist()
    assert counts == [2, 2, 2, 1]
    assert "6 links to images that are listed anyway" in data.read_as[1]


def test_a_class_of_files_that_are_not_read_is_refused_by_name(tmp_path: Path) -> None:
    folder(tmp_path, bigger(COLOR))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "0.heic").write_bytes(b"x")
    with pytest.raises(DataError, match=r"the class folder \S+/c holds no images .*convert what it holds to \.png"):
        listed(tmp_path)


def test_a_part_of_a_data_set_is_no_class(tmp_path: Path) -> None:
    """`train` and `val` were two classes; a class of trains is one."""
    for part in ("train", "val"):
        folder(tmp_path / "parts" / part, bigger(COLOR))
    with pytest.raises(DataError, match=r"holds the folder 'train' with folders of its own.*/train\.$"):
        listed(tmp_path / "parts")
    folder(tmp_path / "vehicles", bigger(COLOR))
    (tmp_path / "vehicles" / "a").rename(tmp_path / "vehicles" / "train")
    assert listed(tmp_path / "vehicles").class_names == ("b", "train")


def test_folders_beside_train_and_test_are_counted(tmp_path: Path) -> None:
    for part in ("train", "test", "val"):
        folder(tmp_path / part, bigger(COLOR))
    data = listed(tmp_path)
    assert (len(data.train), len(data.test)) == (4, 4)
    assert data.read_as == ("8 images: all of 8 bits (divided by 255)", "left out: 1 beside train and test")


def test_images_read_batch_by_batch_are_described_by_some_of_them(tmp_path: Path) -> None:
    folder(tmp_path, bigger(GRAY16), num=40)
    data = listed(tmp_path, in_memory="never")
    assert isinstance(data.train, LazySamples)
    assert data.read_as == ("80 images, of which 32 were examined: all of 16 bits (divided by 65,535)",)


def test_another_file_of_the_same_label_changes_the_digest_of_images_that_are_not_in_memory(tmp_path: Path) -> None:
    folder(tmp_path, bigger(GRAY8))
    before = listed(tmp_path, in_memory="never").digest()
    assert listed(tmp_path, in_memory="never").digest() == before
    image = next(file for file in tmp_path.rglob("*") if file.is_file())
    image.write_bytes(image.read_bytes() + b"more")
    assert listed(tmp_path, in_memory="never").digest() != before


def test_each_site_and_the_server_say_how_their_images_were_read(tmp_path: Path) -> None:
    for name, values in (("north", GRAY8), ("south", GRAY16), ("test", GRAY8)):
        folder(tmp_path / name, bigger(values), num=5)
    (tmp_path / "south" / "a" / "0.heic").write_bytes(b"x")
    partition = {
        "name": "sites",
        "num_clients": 2,
        "roots": [str(tmp_path / "north"), str(tmp_path / "south")],
        "test_root": str(tmp_path / "test"),
    }
    data = {"name": "image_folder", "size": SIZE, "channels": 1, "class_names": ["a", "b"]}
    read = Workload(from_dict({"data": data, "partition": partition, "server": {"cohort_size": 2}})).dataset
    assert read.read_as == (
        "site 'north': 10 images: all of 8 bits (divided by 255)",
        "site 'south': 10 images: all of 16 bits (divided by 65,535)",
        "site 'south': left out: 1 .heic",
        "the server's test data: 10 images: all of 8 bits (divided by 255)",
    )


class Pictures(TorchDataset[Any]):
    def __init__(self, image: Image.Image) -> None:
        self.image, self.targets = image, [0, 1]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.image, self.targets[index]


@pytest.mark.parametrize(
    "kind", ["16-bit PNG", "palette", "palette with transparency", "float TIFF", "8-bit color", "1 bit"]
)
def test_a_picture_from_a_torch_dataset_has_the_pixels_of_its_file(tmp_path: Path, kind: str) -> None:
    suffix, values, write, expected, _ = KINDS[kind]
    path = tmp_path / f"image{suffix}"
    write(values, path)
    with Image.open(path) as image:
        found = features_of(Pictures(image)[0])
    np.testing.assert_allclose(found.expand(3, -1, -1), expected, atol=0.502 / 255)
