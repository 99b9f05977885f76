"""Pixels of a PIL image as a viewer shows them, at the file's bit depth.

[Note: how an image is read] It is turned upright by its EXIF orientation, palettes become colors, and transparent
pixels lie over white.  A value is a fraction of the full range of its type, 255 or 65,535 (less if a TIFF states fewer
bits), however little of the range is used: one scale for all images, at all sites.  Floats have to be fractions.
Whatever has no stated range, or several pages or frames, is refused.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedsign.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_BITS, _PHOTOMETRIC, _ORIENTATION = 258, 262, 274  # TIFF tags
_DEEP = ("I", "F")  # first letters of Pillow's modes of more than 8 bits, all of them gray


def decoded(image: "Image", mode: str) -> tuple["Image", list[str]]:
    """An opened image as `mode` (L or RGB), or as F with fractions, and what its reader should know of it.

    Raises:
        DataError: it has several pages or frames, or values of an unknown range.
    """
    from PIL import ImageOps

    num_frames = getattr(image, "n_frames", 1)
    is_first = num_frames > 1 and image.format == "MPO"  # a photograph, with its preview
    if num_frames > 1 and not is_first:
        raise DataError(f"holds {num_frames} pages or frames; expected one: save each as a file of its own")
    packing = str([tile.args for tile in getattr(image, "tile", [])])  # how a decoder finds the values in the file
    has_16_bits = ";16" in packing or "65535" in packing
    is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    ImageOps.exif_transpose(image, in_place=True)
    kinds = {
        "turned upright (EXIF orientation)": is_turned,
        "laid over white (alpha channel or transparent color)": image.has_transparency_data,
        "the first of several pictures in a file (MPO)": is_first,
    }
    if image.mode[0] in _DEEP:
        image, depth = _fractions(image)
    else:
        depth = "16 bits per color (of which the upper 8 are kept)" if has_16_bits else "8 bits (divided by 255)"
        image = over_white(image, mode)
    return image, [f"of {depth}", *(kind for kind, is_so in kinds.items() if is_so)]


def over_white(image: "Image", mode: str) -> "Image":
    """The image as `mode`; what is transparent becomes white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert(mode)
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert(mode)


def values_of(image: "Image") -> Any:
    """An image in memory as [height, width] or [height, width, channels]: colors of a palette, fractions of 16 bits."""
    if image.mode in ("P", "PA"):
        image = over_white(image, "RGB")
    return np.array(_fractions(image)[0] if image.mode.startswith("I;16") else image)


def _fractions(image: "Image") -> tuple["Image", str]:
    """A gray image of more than 8 bits as fractions (mode F), and its depth in words."""
    from PIL import Image

    raw, tags = np.asarray(image), getattr(image, "tag_v2", {})
    values = raw.astype(np.float32)
    if image.mode == "F":
        depth = "floats (taken as they are)"
        if not (values.min() >= 0 and values.max() <= 1):  # also for NaN
            raise DataError(
                f"has floats from {values.min():g} to {values.max():g}; expected fractions from 0 to 1: scale all "
                "images by the same numbers"
            )
    elif image.mode == "I" and image.format != "PPM":
        raise DataError("has signed or 32-bit integers; expected 8 or 16 bits without a sign, or fractions as floats")
    else:
        bits = tags.get(_BITS, (16,))[0]
        depth, values = f"{bits} bits (divided by {2**bits - 1:,})", values / np.float32(2**bits - 1)
    if tags.get(_PHOTOMETRIC) == 0:
        values = 1 - values  # white is zero, which Pillow inverts for 8 bits alone
    if "transparency" in image.info:
        values[raw == image.info["transparency"]] = 1
    return Image.fromarray(values), depth
