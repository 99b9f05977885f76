"""Tables as samples: numbers stay numbers, text becomes one-hot features; statistics come from training rows only.

[Note: columns] A text column becomes one feature per distinct text of the training rows, in sorted order: 1 where a row
has that text.  A text that only test rows have gives zeros.  A target of texts, booleans or integers is a class, in
sorted order of the training rows' texts, or of all rows' numbers; other targets are real numbers (`target_type`
overrides this).  Missing values are an error, as only the user knows how to fill them.

Default normalization: numbers are scaled to mean 0 and standard deviation 1 over the training rows that remain after
the validation split; one-hot features and booleans are not scaled.  A real target is not scaled unless `scale_target`
is set: then loss and RMSE are in standard deviations of the training rows' targets.

Texts, classes and the scale of the target are determined before the validation split, from all training rows, because
they define the shape and the unit of the model's output.  A text that only validation rows have is a feature that is
always 0 in training.

[Note: agreed columns] If tables lie at separate sites (`partition.name=sites`), no single table may determine a
model's shape.  `class_names` and `levels` (column -> its texts) list the possible values, in order.  A value that is
not listed is an error; a listed value may be absent.  With `strict`, a column that is not named anywhere is an error
too (`unused` names the columns to ignore), and nothing is inferred: features must be named, text columns need levels,
and a target without class names is a number.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from fedsign.data.base import Dataset, Frame, Samples
from fedsign.data.files import check_classes
from fedsign.data.spelling import are_marked, has_decimal_commas, is_number, separator_of
from fedsign.data.splitting import train_test
from fedsign.data.table_files import READ_AS, VECTORS, check_kinds, kind_of, read_table
from fedsign.errors import DataError, nearest

if TYPE_CHECKING:
    import pandas as pd

TargetType = Literal["auto", "class", "number"]
_MAX_TEXTS = 1000  # per column: names or ids would otherwise become as many features


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """How to read a table, and the roles of its columns."""

    path: str
    test_path: str | None = None
    target: str = "target"
    features: tuple[str, ...] = ()  # empty: all other columns
    categorical: tuple[str, ...] = ()  # numeric columns to encode as one-hot
    owner: str | None = None
    target_type: TargetType = "auto"
    scale_target: bool = False
    class_names: tuple[str, ...] = ()  # empty: from the training rows
    levels: Mapping[str, tuple[str, ...]] | None = None  # texts by column; for other columns, from the training rows
    unused: tuple[str, ...] = ()
    strict: bool = False
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @property
    def files(self) -> tuple[str, str]:
        """The files of training and test rows."""
        return self.path, self.test_path or self.path

    @property
    def owners(self) -> list[str]:
        """The owner column, if any."""
        return [] if self.owner is None else [self.owner]

    def levels_of(self, name: str) -> tuple[str, ...] | None:
        """The agreed texts of a column, if any."""
        return (self.levels or {}).get(name)


def tabular(read: Callable[..., "pd.DataFrame"]) -> Callable[..., Dataset]:
    """Decorator: turn a file reader into a data set factory, with the settings of `Columns` and the reader's own.

    See [Note: columns] for the encoding.
    """
    own = [each for each in signature(read).parameters.values() if each.kind is Parameter.KEYWORD_ONLY]
    path = f"data.{read.__name__}"

    @wraps(read)
    def dataset(seed: int, **settings: Any) -> Dataset:
        of_reader = {each.name: settings.pop(each.name) for each in own if each.name in settings}
        return from_tables(partial(read, **of_reader), Columns(**{"path": path, **settings}), seed)

    _, *others = signature(Columns).parameters.values()
    given = [
        Parameter("seed", Parameter.POSITIONAL_ONLY),
        Parameter("path", Parameter.KEYWORD_ONLY, default=path, annotation=str),
    ]
    parameters = [*given, *others, *own]
    hints = {each.name: each.annotation for each in parameters[1:]}
    # settings are read from the signature (docs/decisions/0002); with **settings alone any key would be accepted
    vars(dataset).update(__signature__=Signature(parameters), frame=_frame)
    dataset.__annotations__ = hints
    return dataset


def _frame(settings: Mapping[str, Any]) -> Frame:
    """The frame that agreed columns determine."""
    levels = settings.get("levels") or {}  # a setting that is None is not among them
    num_features = sum(len(levels[name]) if name in levels else 1 for name in settings["features"])
    return Frame(
        input_shape=(num_features,) if num_features else (),
        is_standardized=True,
        remedy='name the columns to predict from, such as --set \'data.features=["age", "pressure"]\'',
    )


def from_tables(read: Callable[[Path], "pd.DataFrame"], columns: Columns, seed: int) -> Dataset:
    """A data set from one file, split by the seed, or from separate files for training and test.

    Raises:
        DataError: a file or a column is missing, or cannot be trained on.
    """
    train = test = read_table(read, columns.path, "data.path")
    columns = _spread(columns, train.attrs.get(VECTORS, {}))
    read_as = [train.attrs.get(READ_AS)]
    if columns.test_path is None:
        first, second = train_test(len(train), seed, columns.test_fraction)
        train, test = train.iloc[first], train.iloc[second]
    else:
        test = read_table(read, columns.test_path, "data.test_path")
        read_as.append(test.attrs.get(READ_AS))
    if columns.strict:
        for part, file in zip((train, test), columns.files, strict=True):
            _check_agreed(part, columns, file)
    names = _feature_names(train, columns)
    _check_complete(train, [*names, columns.target, *columns.owners], columns, columns.files[0])
    _check_complete(test, [*names, columns.target], columns, columns.files[1])
    check_kinds(train, [*names, columns.target])
    encoded = [_encode(train, test, name, columns) for name in names]
    features = [np.concatenate([each[part] for each in encoded], axis=1) for part in (0, 1)]
    texts = [each.texts or (None,) for each in encoded]
    scaled = [each.is_scaled for each, of_column in zip(encoded, texts, strict=True) for _ in of_column]
    targets, class_names = _targets(train[columns.target], test[columns.target], columns)
    return Dataset(
        train=Samples(
            features=torch.from_numpy(features[0]),
            targets=targets[0],
            owners=_owners(train[columns.owner]) if columns.owner is not None else None,
        ),
        test=Samples(features=torch.from_numpy(features[1]), targets=targets[1]),
        class_names=class_names,
        read_as=tuple(filter(None, read_as)),
        notes=_merged(train, names, columns),
        standardized=tuple(scaled),
        feature_names=tuple(name for name, of_column in zip(names, texts, strict=True) for _ in of_column),
        feature_texts=tuple(text for of_column in texts for text in of_column),
    )


def _spread(columns: Columns, vectors: Mapping[str, int]) -> Columns:
    """The settings, with the columns of its numbers for each column of lists."""
    for key, names in {"target": [columns.target], "owner": columns.owners, "categorical": columns.categorical}.items():
        if named := next((name for name in names if name in vectors), None):
            raise DataError(f"data.{key} names the column '{named}', which holds lists; expected one value a row.")

    def spread(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            part
            for name in names
            for part in ([f"{name}[{at}]" for at in range(vectors[name])] if name in vectors else [name])
        )

    return replace(columns, features=spread(columns.features), unused=spread(columns.unused))


def _check_agreed(table: "pd.DataFrame", columns: Columns, path: str) -> None:
    """Check a table against [Note: agreed columns]."""
    if not columns.features:
        raise DataError(
            "data.features was not given, but tables that lie apart have to agree on it; name the columns to predict "
            "from, such "
            'as --set \'data.features=["age", "pressure"]\'.'
        )
    if columns.scale_target:
        raise DataError(
            "data.scale_target=true was given, but tables that lie apart have no scale in common; scale the column "
            "at every site by the same numbers, and set data.scale_target=false."
        )
    unlevelled = next((name for name in columns.categorical if columns.levels_of(name) is None), None)
    if unlevelled is not None:
        raise DataError(
            f"data.categorical names the column '{unlevelled}' without its levels; give them with "
            f"--set 'data.levels.{unlevelled}=[\"...\"]'."
        )
    named = (columns.target, *columns.features, *columns.unused, *columns.owners)
    if extra := [name for name in table.columns if name not in named]:
        which, them = ("which are", "them") if extra[1:] else ("which is", "it")
        raise DataError(
            f"{path} has {'the' if extra[1:] else 'a'} {_columns(extra)}, {which} named neither in data.features nor "
            f"in data.unused; name {them} in one of them or take {them} out.{nearest(extra[0], named)}"
        )


def _feature_names(table: "pd.DataFrame", columns: Columns) -> list[str]:
    """The feature columns, in the given order or in the file's."""
    known = [str(name) for name in table.columns]
    wanted = {"target": [columns.target], "features": columns.features, "categorical": columns.categorical}
    # not all of the tables that lie apart need have an unused column
    unused = () if columns.strict else columns.unused
    for key, names in {**wanted, "levels": columns.levels or {}, "unused": unused, "owner": columns.owners}.items():
        if absent := [name for name in names if name not in known]:
            name, what = absent[0], f"the {_columns(absent)}"
            if sum(map(is_number, known)) > len(known) / 2:
                raise DataError(
                    f"data.{key} names {what}, but the first line of {columns.path} holds numbers "
                    f"({', '.join(known[:5])}, ...); insert a line with the names of the {len(known)} columns."
                )
            shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
            hint = nearest(name, known)
            if key == "target" and not hint:
                hint = " Name the one to predict with --set data.target=COLUMN."
            raise DataError(f"data.{key} names {what}, but the columns of {columns.path} are {shown}.{hint}")
    if columns.owner == columns.target:
        raise DataError(
            f"data.owner={columns.owner} was given with data.target={columns.target}; a column cannot be both: name "
            "another one, or leave data.owner out."
        )
    left = [name for name in known if name not in (columns.target, columns.owner, *columns.unused)]
    chosen = list(columns.features or left)
    if columns.owner in chosen:
        raise DataError(
            f"data.features={chosen} was given with data.owner={columns.owner}, but the owner is no feature; leave "
            "it out of data.features, or leave data.owner out."
        )
    if not chosen or columns.target in chosen:
        raise DataError(
            f"data.features={chosen} was given with data.target={columns.target}; expected at least one column, "
            "and not the target."
        )
    return chosen


def _check_complete(table: "pd.DataFrame", names: list[str], columns: Columns, path: str) -> None:
    if absent := [name for name in names if name not in table.columns]:
        raise DataError(f"{path} has no {_columns(absent)}, which the training rows have.")
    missing = {name: table[name].isna().to_numpy() for name in names}
    if empty := [name for name, rows in missing.items() if rows.all()]:
        raise DataError(
            f"{_columns(empty)} of {path} {'are' if empty[1:] else 'is'} empty; {_leave_out(empty, columns)}."
        )
    if gaps := [
        # the index still counts the file's rows, since .iloc kept it through the split
        f"column '{name}' of {path} has {num} missing value{'s' if num > 1 else ''}, the first in row "
        f"{int(table.index[rows][0]) + 1} of the data"
        for name, rows in missing.items()
        if (num := int(rows.sum()))
    ]:
        raise DataError(f"{'; '.join(gaps)}; fill in what is missing, or leave rows or columns out (data.features).")
    real = [name for name in names if table[name].dtype.kind == "f"]
    if infinite := [name for name in real if not np.isfinite(table[name].to_numpy()).all()]:
        raise DataError(
            f"{_columns(infinite)} of {path} {'have' if infinite[1:] else 'has'} infinite values; correct or leave "
            "them out."
        )


def _columns(names: Sequence[str]) -> str:
    """Columns by name, for a message."""
    return f"column{'s' if names[1:] else ''} " + ", ".join(f"'{name}'" for name in names)


def _leave_out(names: Sequence[str], columns: Columns) -> str:
    """How to do without columns."""
    if {*names} & {columns.target, *columns.owners}:
        return "fill it in, or name another column"
    what = "them" if names[1:] else "it"
    if columns.features:
        return f"leave {what} out of data.features"
    return f"leave {what} out: --set 'data.unused={_listed([*columns.unused, *names])}'"


def _merged(train: "pd.DataFrame", names: Iterable[str], columns: Columns) -> tuple[str, ...]:
    """Warnings about whole numbers that are the same in float32, such as those of large ids."""
    notes = []
    for name in names:
        values = train[name].to_numpy()
        if kind_of(train[name]) != "whole" or name in columns.categorical or columns.levels_of(name) is not None:
            continue
        if max(abs(int(values.min())), abs(int(values.max()))) > 2**24:  # up to there, float32 has all
            before, after = len(np.unique(values)), len(np.unique(values.astype(np.float32)))
            if after < before:
                notes.append(
                    f"column '{name}' has {before:,} different whole numbers, of which float32 tells {after:,} apart; "
                    f"subtract a constant in the file, or, if they are ids, {_leave_out([name], columns)}."
                )
    return tuple(notes)


class _Encoded(NamedTuple):
    """One column as features [rows, ...]."""

    train: npt.NDArray[np.float32]
    test: npt.NDArray[np.float32]
    is_scaled: bool = False
    texts: tuple[str, ...] = ()  # one for each feature; none for numbers


def _encode(train: "pd.DataFrame", test: "pd.DataFrame", name: str, columns: Columns) -> _Encoded:
    """One column of training and test rows as features."""
    kind = kind_of(train[name])
    levels = columns.levels_of(name)
    if kind != "text" and name not in columns.categorical and levels is None:
        if kind_of(test[name]) in ("text", "other"):
            raise DataError(
                f"column '{name}' holds numbers in the training rows, but {test[name].dtype} in the test rows."
            )
        numbers = [part[name].to_numpy(np.float32)[:, None] for part in (train, test)]
        return _Encoded(numbers[0], numbers[1], kind != "bool")
    texts = [part[name].astype(str).to_numpy(str) for part in (train, test)]
    if columns.strict and levels is None:
        raise DataError(
            f"column '{name}' of {columns.path} holds texts, whose levels tables that lie apart have to agree on; "
            f"give them with --set 'data.levels.{name}=[\"...\"]', or correct the column{_or_numbers(texts[0])}."
        )
    known = np.array(levels) if levels is not None else np.unique(texts[0])
    if levels is not None:
        for part, file in zip(texts, columns.files, strict=True):
            _check_levels(part, name, levels, file)
    if len(known) > _MAX_TEXTS:
        raise DataError(
            f"column '{name}' has {len(known)} different values, such as '{known[0]}', which would be as many features"
            f"; {_leave_out([name], columns)}{_or_numbers(known)}."
        )
    # a text that is not known compares equal to none, and so gives zeros
    one_hot = [(part[:, None] == known).astype(np.float32) for part in texts]  # [rows, texts]
    return _Encoded(one_hot[0], one_hot[1], texts=tuple(known.tolist()))


def _as_numbers(texts: Sequence[str]) -> tuple[str, str]:
    """What made texts of numbers, and a remedy; empty if they are none."""
    if mark := separator_of(texts):
        return "separators of thousands", f"use --set 'data.thousands={mark}' (for csv), or write them without"
    if has_decimal_commas(texts):
        return "decimal commas", "use --set 'data.decimal=,' (for csv), or write them with points"
    if are_marked(texts):
        return "signs around them", "write plain numbers"
    return "", ""


def _or_numbers(texts: npt.NDArray[np.str_]) -> str:
    """A remedy if texts are numbers."""
    what, remedy = _as_numbers(texts.tolist())
    return f"; since they are numbers with {what}, {remedy}" if what else ""


def _listed(names: Iterable[str]) -> str:
    """Names as a list in TOML."""
    return json.dumps([*dict.fromkeys(names)], ensure_ascii=False)


def _check_levels(texts: npt.NDArray[np.str_], name: str, levels: tuple[str, ...], path: str) -> None:
    unknown = next((text for text in np.unique(texts).tolist() if text not in levels), None)
    if unknown is not None:
        raise DataError(
            f"column '{name}' of {path} has the text '{unknown}', which is none of data.levels.{name} "
            f"({', '.join(levels)}); correct it, or add it to the levels.{nearest(unknown, levels)}"
        )


def _targets(
    train: "pd.Series[Any]", test: "pd.Series[Any]", columns: Columns
) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    """Labels with class names, or real numbers without; see [Note: columns]."""
    kind = kind_of(train)
    if columns.class_names:
        if columns.target_type == "number" or columns.scale_target:
            raise DataError(
                "data.class_names was given with data.target_type=number or data.scale_target=true, and a number has "
                "no classes; leave the one or the other out."
            )
        agreed = [
            _among(part, columns.class_names, file) for part, file in zip((train, test), columns.files, strict=True)
        ]
        return (agreed[0], agreed[1]), columns.class_names
    is_number = columns.target_type == "auto" and (kind == "real" or columns.strict)
    if columns.target_type == "number" or is_number:
        if kind in ("text", "other") or kind_of(test) in ("text", "other"):
            raise DataError(
                f"the target '{train.name}' holds {train.dtype}, but data.target_type=number needs numbers"
                f"{_or_numbers(train.astype(str).to_numpy(str))}."
            )
        # a constant target has no scale: `or 1.0` only shifts it
        shift, scale = (train.mean(), train.std(ddof=0) or 1.0) if columns.scale_target else (0.0, 1.0)
        return (_real((train - shift) / scale), _real((test - shift) / scale)), ()
    if columns.scale_target:
        raise DataError(
            f"data.scale_target=true was given, but the target '{train.name}' is a class; set it to false, or say "
            "data.target_type=number."
        )
    given = [
        part.to_numpy() if kind in ("whole", "bool", "real") else part.astype(str).to_numpy(str)
        for part in (train, test)
    ]
    if kind == "text" and (what := _as_numbers(given[0].tolist()))[0]:
        raise DataError(
            f"the target '{train.name}' holds numbers with {what[0]}, such as '{given[0][0]}', each of which would "
            f"be a class; {what[1]}."
        )
    has_texts = not {kind, kind_of(test)} <= {"whole", "bool", "real"}
    # a number of test rows alone is a class, as in [Note: labels]; a text is more likely misspelled
    known = np.unique(given[0] if has_texts else np.concatenate(given))  # sorted, on which searchsorted relies
    unknown = sorted(set(given[1].tolist()) - set(known.tolist()), key=str)
    if unknown:
        raise DataError(
            f"the target '{train.name}' has the class '{unknown[0]}' in the test rows only, so no model could learn "
            "it; leave these rows out, give both files all classes, or, if it is a quantity, use --set "
            "data.target_type=number --set task=regression --set 'metrics=[\"rmse\"]'."
            f"{nearest(str(unknown[0]), map(str, known.tolist())) if kind == 'text' else ''}"
        )
    labels = [torch.from_numpy(np.searchsorted(known, part).astype(np.int64)) for part in given]
    return (labels[0], labels[1]), tuple(str(value) for value in known.tolist())


def _among(column: "pd.Series[Any]", class_names: tuple[str, ...], path: str) -> Tensor:
    """Labels as indices into the agreed class names."""
    names = [str(value) for value in column.tolist()]
    check_classes(dict.fromkeys(names), class_names, where=f"the target '{column.name}' of {path}")
    position = {name: index for index, name in enumerate(class_names)}
    return torch.tensor([position[name] for name in names], dtype=torch.int64)


def _real(column: "pd.Series[Any]") -> Tensor:
    return torch.from_numpy(column.to_numpy(np.float32))


def _owners(column: "pd.Series[Any]") -> Tensor:
    """Owner indices from 0, in sorted order of the column's values."""
    # integers stay integers, so that owner 2 comes before owner 10
    values = column.to_numpy() if kind_of(column) == "whole" else column.astype(str).to_numpy(str)
    return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
