"""condensation.html: the learned images and the course of training, in one self-contained file."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from fedsign.bilevel.condense import Condensation
from fedsign.report.chart import Chart, Series
from fedsign.report.run_charts import line_chart
from fedsign.report.template import render
from fedsign.report.wording import NARROW_SPACE
from fedsign.storage.owned import writing
from simulations.api import environment

FILES = ("condensation.html", "images.png", "start.png")
_LARGEST_SIDE = 112  # of an image on the page, in pixels
_LARGEST_OF_MANY = 56  # if a class has more than one
_GAP = 1  # between the images of a sheet, in their own pixels
_LARGEST_WIDTH = 1200  # of a sheet
_FAINT = 245


def write_page(
    folder: Path,
    condensation: Condensation,
    records: Sequence[Mapping[str, Any]],
    *,
    before: NDArray[Any],
    after: NDArray[Any],
) -> list[Path]:
    """Write the page and the images [k, c, h, w] as PNG sheets, a column per class; `records`: a record per step.

    Raises:
        ResultsError: the folder cannot be written, or a file of such a name is not FedSign's.
    """
    config, dataset, network = condensation.config, condensation.dataset, condensation.config.network
    rows = []
    for label, name in enumerate(dataset.class_names):
        chosen = (condensation.labels == label).nonzero().flatten().tolist()
        side = _LARGEST_SIDE if len(chosen) == 1 else _LARGEST_OF_MANY
        rows.append((name, [(picture(before[index], side), picture(after[index], side)) for index in chosen]))
    kind = f"MLP {list(network.hidden)}" if network.kind == "mlp" else f"ConvNet of width {network.width}"
    facts = [
        ("data", config.data.name, f"{len(dataset.train):,} training images"),
        ("images", str(len(after)), f"{config.images_per_class} of each class, from {config.start}"),
        ("network", kind, f"{condensation.network.size:,} parameters"),
        ("training", f"{config.inner.depth} steps", f"at {config.inner.lr:g}, momentum {config.inner.momentum:g}"),
        ("method", config.method.name, f"{config.outer.steps} steps at {config.outer.lr:g}"),
    ]
    first = config.first_phase
    if first.steps:
        facts.append(("first phase", first.method.name, f"{first.steps} steps at {first.lr:g}"))
    start, ended = (100 * records[at]["accuracy"] for at in (0, -1))
    page = render(
        "condensation.html.jinja",
        package=__package__,
        name=config.name,
        headline=("accuracy", f"{ended:.1f}{NARROW_SPACE}%", f"{start:.1f}{NARROW_SPACE}% at the start"),
        facts=facts,
        rows=rows,
        charts=charts(records),
        config_toml=config.to_toml(),
        environment={key: str(value) for key, value in environment().items()},
    )
    with writing(folder, "condensation") as staged:
        (staged / FILES[0]).write_text(page, encoding="utf-8")
        for name, images in zip(FILES[1:], (after, before), strict=True):
            sheet(images, num_classes=len(dataset.class_names)).save(staged / name)
    return [folder / name for name in FILES]


def charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Plot the accuracy of fresh networks, the loss on real images, and the variance of the gradient estimates."""
    shown = {
        "Test accuracy": ("accuracy", "Of fresh networks that were trained on the synthetic images alone."),
        "Loss on real images": ("loss", "After each step's training."),
        "Variance": (
            "relative_variance",
            "Of the hypergradient's estimate, relative to an estimate of the gradient's own squared norm.",
        ),
    }
    drawn = []
    for title, (key, text) in shown.items():
        known = [record for record in records if record.get(key) is not None]
        if known or key == "accuracy":
            steps, values = [int(record["step"]) for record in known], [record[key] for record in known]
            series = Series(name=key.replace("_", " "), x=steps, y=values)
            drawn.append(line_chart(title, [series], x="step", percent=key == "accuracy", text=text))
    return drawn


def picture(image: NDArray[Any], largest_side: int) -> Markup:
    """Return an inline image element, enlarged without smoothing."""
    drawn = _drawn(image)
    held = io.BytesIO()
    drawn.save(held, format="PNG")
    # whole: with a fractional factor some pixels would be wider than others
    factor = max(1, largest_side // max(drawn.size))
    width, height = (factor * side for side in drawn.size)
    source = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    template = Markup('<img src="{}" width="{}" height="{}" alt="" style="image-rendering: pixelated">')
    return template.format(source, width, height)


def sheet(images: NDArray[Any], *, num_classes: int) -> Image.Image:
    """Arrange all images in one column per class, enlarged without smoothing."""
    count, channels, height, width = images.shape
    num_rows = -(-count // num_classes)  # rounded up
    size = (num_classes * (width + _GAP) + _GAP, num_rows * (height + _GAP) + _GAP)
    paper = Image.new("RGB", size, (_FAINT,) * 3) if channels == 3 else Image.new("L", size, _FAINT)
    for index, image in enumerate(images):
        # images are sorted by class, equally many of each, so that a class fills one column
        column, row = divmod(index, num_rows)
        paper.paste(_drawn(image), (column * (width + _GAP) + _GAP, row * (height + _GAP) + _GAP))
    factor = max(1, _LARGEST_WIDTH // paper.width)
    return paper.resize((paper.width * factor, paper.height * factor), Image.Resampling.NEAREST)


def _drawn(image: NDArray[Any]) -> Image.Image:
    # clip: a mean may exceed 1 by a rounding error, and uint8 would wrap around
    pixels = np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)
    return Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
