"""How readers treat the classes and columns named in the configuration: the contract that sites rely on."""

import csv as csv_files
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsign import plugins
from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.client_data import rooted
from fedsign.data.csv import csv
from fedsign.data.images.image_folder import image_folder
from fedsign.data.npz import npz
from fedsign.errors import ConfigError, DataError
from fedsign.workload import Workload

CLASSES = ("healthy", "ill", "rare")


def images(root: Path, *classes: str) -> Path:
    """Three gray images of each class; the first class is black, the next one brighter by 50, ..."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (4, 4), 50 * CLASSES.index(name) if name in CLASSES else 9).save(
                root / name / f"{number}.png"
            )
    return root


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv_files.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_class_without_a_folder_keeps_its_place(tmp_path: Path) -> None:
    data = image_folder(
        0, root=str(images(tmp_path, "rare", "healthy")), size=4, channels=1, class_names=CLASSES, test_fraction=0.4
    )
    assert data.class_names == CLASSES
    for part in (data.train, data.test):
        brightness = part.features.mean(dim=(1, 2, 3)) * 255 / 50
        assert torch.equal(part.targets, brightness.round().long())
    assert {*data.train.targets.tolist(), *data.test.targets.tolist()} == {0, 2}


def test_a_class_folder_may_be_empty_if_the_class_is_agreed_on(tmp_path: Path) -> None:
    (images(tmp_path, "healthy") / "ill").mkdir()
    data = image_folder(0, root=str(tmp_path), size=4, channels=1, class_names=CLASSES)
    assert len(data.train) + len(data.test) == 3 and data.class_names == CLASSES


def test_training_and_test_folders_may_have_different_agreed_classes(tmp_path: Path) -> None:
    images(tmp_path / "train", "healthy", "ill")
    images(tmp_path / "test", "ill", "rare")
    data = image_folder(0, root=str(tmp_path), size=4, channels=1, class_names=CLASSES)
    assert data.train.targets.tolist() == [0, 0, 0, 1, 1, 1] and data.test.targets.tolist() == [1, 1, 1, 2, 2, 2]


def test_an_unknown_class_folder_is_named_with_its_place(tmp_path: Path) -> None:
    images(tmp_path, "healthy", "heathy")
    with pytest.raises(DataError, match=rf"{tmp_path} has the class folder 'heathy', .* Did you mean 'healthy'\?"):
        image_folder(0, root=str(tmp_path), size=4, channels=1, class_names=CLASSES)


def test_labels_of_npz_are_positions_in_the_class_names(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=np.zeros((10, 2)), y=np.array([0, 2] * 5))
    data = npz(0, path=str(file), class_names=CLASSES)
    assert data.class_names == CLASSES and {*data.train.targets.tolist(), *data.test.targets.tolist()} == {0, 2}
    np.savez(file, x=np.zeros((10, 2)), y=np.array([0, 3] * 5))
    with pytest.raises(DataError, match=rf"{file} holds .* targets that are not integers from 0 to 2, .* such as 3"):
        npz(0, path=str(file), class_names=CLASSES)


def test_class_names_of_an_npz_file_are_looked_up_by_name(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    arrays: dict[str, Any] = {"x_train": np.zeros((2, 2)), "y_train": np.array([0, 1])}
    arrays |= {"x_test": np.zeros((1, 2)), "y_test": np.array([1])}
    np.savez(file, **arrays, class_names=np.array(["rare", "healthy"]))
    data = npz(0, path=str(file), class_names=CLASSES)
    assert data.train.targets.tolist() == [2, 0] and data.test.targets.tolist() == [0]
    np.savez(file, **arrays, class_names=np.array(["rare", "unheard of"]))
    with pytest.raises(DataError, match=rf"{file} has the class 'unheard of'"):
        npz(0, path=str(file), class_names=CLASSES)


def test_real_targets_have_no_class_names(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=np.zeros((10, 2)), y=np.linspace(0, 1, 10))
    with pytest.raises(DataError, match="holds real targets"):
        npz(0, path=str(file), class_names=CLASSES)


ROWS = [{"age": 20 + n, "sex": "fm"[n % 2], "ward": n % 3, "outcome": ("healthy", "ill")[n % 2]} for n in range(10)]
AGREED: dict[str, Any] = {
    "target": "outcome",
    "features": ("age", "sex", "ward"),
    "categorical": ("ward",),
    "levels": {"sex": ("x", "m", "f"), "ward": ("0", "1", "2", "9")},
    "class_names": CLASSES,
    "strict": True,
}


def test_levels_and_class_names_decide_the_features_and_labels_of_a_table(tmp_path: Path) -> None:
    """Row n: [age, x, m, f, ward is 0, 1, 2, 9], whatever texts occur."""
    file = table(tmp_path / "a.csv", ROWS)
    data = csv(0, path=str(file), test_path=str(table(tmp_path / "b.csv", ROWS[:1])), **AGREED)
    expected = [[20.0 + n, 0, n % 2, 1 - n % 2, n % 3 == 0, n % 3 == 1, n % 3 == 2, 0] for n in range(10)]
    assert data.train.features.tolist() == expected
    assert data.train.targets.tolist() == [n % 2 for n in range(10)]
    assert data.test.features.tolist() == expected[:1] and data.class_names == CLASSES


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        ({"sex": "d"}, {}, "column 'sex' of {file} has the text 'd', which is none of data.levels.sex (x, m, f)"),
        (
            {"outcome": "dead"},
            {},
            "the target 'outcome' of {file} has the class 'dead', which is none of data.class_names",
        ),
        ({"name": "Jo"}, {}, "{file} has a column 'name', which is named neither in data.features nor in data.unused"),
        (
            {},
            {"features": ("age", "sex", "ward", "weight")},
            "data.features names the column 'weight', but the columns of {file} are",
        ),
        ({}, {"features": ()}, "data.features was not given, but tables that lie apart have to agree on it"),
        ({}, {"levels": {"ward": ("0", "1", "2")}}, "column 'sex' of {file} holds texts, whose levels"),
        ({}, {"levels": {"sex": ("f", "m")}}, "data.categorical names the column 'ward' without its levels"),
        ({}, {"scale_target": True}, "tables that lie apart have no scale in common"),
        ({}, {"target_type": "number"}, "a number has no classes"),
    ],
)
def test_what_a_strict_table_has_besides_or_lacks_is_one_sentence(
    change: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = table(tmp_path / "a.csv", [{**row, **change} for row in ROWS])
    with pytest.raises(DataError) as caught:
        csv(0, path=str(file), **{**AGREED, **settings})
    assert said.format(file=file) in str(caught.value) and "\n" not in str(caught.value)


def test_unused_columns_are_left_out(tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", [{**row, "name": "Jo"} for row in ROWS])
    assert csv(0, path=str(file), **AGREED, unused=("name",)).input_shape == (8,)
    plain = csv(0, path=str(file), target="outcome", unused=("name", "sex", "ward"))
    assert plain.input_shape == (1,)


def test_without_class_names_a_strict_target_is_a_number_even_if_all_are_whole(tmp_path: Path) -> None:
    file = table(tmp_path / "a.csv", ROWS)
    data = csv(0, path=str(file), target="age", features=("ward",), unused=("sex", "outcome"), strict=True)
    assert data.class_names == () and data.train.targets.dtype == torch.float32


def plain_rows(seed: int) -> Dataset:
    features = torch.arange(12.0).reshape(6, 2)
    part = Samples(features=features, targets=torch.arange(6) % 2)
    return Dataset(train=part, test=part, class_names=("a", "b"))


def normalized_by(**data: Any) -> Workload:
    return Workload(
        from_dict(
            {
                "data": {"name": f"{__name__}:plain_rows", **data},
                "partition": {"name": "iid", "num_clients": 2},
                "server": {"cohort_size": 2},
            }
        )
    )


def test_constants_normalize_by_the_configurations_numbers() -> None:
    features = normalized_by(normalize="constants", mean=[4.0, 1.0], std=[2.0, 4.0]).dataset.train.features
    raw = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(features, torch.stack([(raw[:, 0] - 4) / 2, (raw[:, 1] - 1) / 4], dim=1))


@pytest.mark.parametrize(
    "data",
    [
        {"normalize": "constants"},
        {"normalize": "constants", "mean": [1.0], "std": [1.0, 2.0]},
        {"mean": [1.0], "std": [1.0]},
        {"std": [1.0]},
    ],
)
def test_constants_need_a_mean_and_a_deviation_each_and_nothing_else_takes_them(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.normalize=\w+ was given with \d numbers in data\.mean"):
        from_dict({"data": data})


def test_constants_are_one_for_each_channel() -> None:
    with pytest.raises(DataError, match=r"data\.mean has 3 numbers and a sample 2 channels"):
        _ = normalized_by(normalize="constants", mean=[0.0] * 3, std=[1.0] * 3).dataset


@pytest.mark.parametrize(
    ("name", "is_folder", "expected"),
    [
        ("image_folder", True, {"root": "{root}"}),
        ("npz", True, {"path": "{root}/data.npz"}),
        ("csv", True, {"path": "{root}/data.csv", "test_path": "{root}/held.csv"}),
        ("csv", False, {"path": "{root}", "test_path": "{parent}/held.csv"}),
    ],
)
def test_a_root_is_a_folder_or_a_file(name: str, is_folder: bool, expected: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "here"
    root.mkdir() if is_folder else root.touch()
    held: dict[str, Any] = {"test_path": "held.csv"} if name == "csv" else {}
    settings = rooted(from_dict({"data": {"name": name, **held}}).data, str(root))
    for key, value in expected.items():
        assert settings[key] == value.format(root=root, parent=tmp_path)
    assert settings.keys() <= {*plugins.names_of("dataset", name)}


def test_a_reader_without_a_root_has_no_sites() -> None:
    with pytest.raises(ConfigError, match=r"data\.name=digits takes neither a root nor a path"):
        rooted(from_dict({}).data, "anywhere")
