"""The images below class folders, sorted by folder and name, and what was left out of them.

[Note: left out] Hidden and system files and folders, files of other extensions, and links to images that are listed
anyway: the file itself wins, otherwise the first link.  Other links are followed, since many data sets are folders of
links.  A class folder that held only links of the first kind is no class.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedsign.errors import DataError

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
_SYSTEM = ("__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "system volume information", "__pycache__")
_PARTS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev")


class _Image(NamedTuple):
    folder: str
    name: str
    place: str  # its path without links
    is_linked: bool  # itself, or a folder above it


def class_files(root: Path, *, may_be_empty: bool) -> tuple[dict[str, list[str]], Counter[str]]:
    """The image files of each class folder of `root`, and how much of what was left out; see [Note: left out].

    Raises:
        DataError: a class folder has no images and may not be empty, or is one of folders of classes.
        OSError: a folder cannot be listed.
    """
    left_out, top = Counter[str](), os.path.realpath(root)
    entries = _visible(str(root), left_out)
    left_out["beside the class folders"] += sum(not entry.is_dir() for entry in entries)
    found = {entry.name: sorted(_walk(entry, (top,), False, left_out)) for entry in entries if entry.is_dir()}
    if not found:
        raise OSError("it has no class folders")
    seen = {image.place for images in found.values() for image in images if not image.is_linked}
    files: dict[str, list[str]] = {}
    for name, images in found.items():
        if name.lower() in _PARTS and images and all(image.folder != str(root / name) for image in images):
            raise DataError(
                f"{root.absolute()} holds the folder '{name}' with folders of its own, and expected are {root}/train "
                f"and {root}/test, or class folders alone; rename it, or read one with --set data.root={root / name}."
            )
        files[name] = []
        for image in images:
            if image.is_linked and image.place in seen:
                left_out["links to images that are listed anyway"] += 1
            else:
                seen.add(image.place)
                files[name].append(str(Path(image.folder, image.name)))
        if images and not files[name]:
            del files[name]
        elif not images and not may_be_empty:
            raise DataError(
                f"the class folder {root.absolute() / name} holds no images ({', '.join(EXTENSIONS)}); convert what it "
                "holds to .png, or remove it."
            )
    return files, left_out


def _visible(folder: str, left_out: Counter[str]) -> list[os.DirEntry[str]]:
    """What a folder holds, by name."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    shown = [entry for entry in entries if entry.name[0] != "." and entry.name.lower() not in _SYSTEM]
    left_out["hidden or system files and folders"] += len(entries) - len(shown)
    return shown


def _walk(entry: os.DirEntry[str], above: tuple[str, ...], is_linked: bool, left_out: Counter[str]) -> Iterator[_Image]:
    """The images of a folder; `above` are the places of the folders above it."""
    is_linked |= entry.is_symlink()
    path, place = Path(entry.path), str(Path(above[-1], entry.name))
    if entry.is_symlink():
        place = os.path.realpath(path)
    if entry.is_dir():
        # a link to a folder above it would never end
        for inner in () if place in above else _visible(entry.path, left_out):
            yield from _walk(inner, (*above, place), is_linked, left_out)
    elif (suffix := path.suffix.lower()) in EXTENSIONS:
        yield _Image(str(path.parent), path.name, place, is_linked)
    else:
        left_out[suffix or "without an extension"] += 1
