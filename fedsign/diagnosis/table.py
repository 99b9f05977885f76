"""The rules of columns and class names: what a reader took for a feature, a text, or a class, and is none.

[Note: numbers of samples] A feature numbers the samples if its values are different whole numbers that lie so close
together that they would not be different by chance.  Of n numbers drawn from m, all are different with a probability
of about exp(-n^2 / 2m), the birthday problem; here of exp(-10) at most.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedsign import plugins
from fedsign.data.base import IntArray, Samples
from fedsign.data.spelling import (
    are_marked,
    are_separated,
    bare,
    has_decimal_commas,
    is_number,
    pointed,
    separator_of,
    variants,
)
from fedsign.diagnosis.data_rule import DataRule, Found, data_rule, extended, found_columns
from fedsign.diagnosis.examined import Examined

_NAMELESS = re.compile(r"Unnamed: \d+")  # pandas' name for a column without one
_UNLIKELY = 10.0  # minus the logarithm of a probability, see [Note: numbers of samples]
_SAMPLED = 64  # samples that rule out almost all features
_FEWEST = 20  # samples, or classes
_FEWEST_NUMBERS = 5  # different numbers among the texts of a column
_RARE = 2  # samples of a class
_ALIKE = 0.85  # similarity of two names, of which one may be a slip


def _texts(data: Examined) -> dict[str, dict[str, int]]:
    """The text columns, unless they were named as categories: each text with its feature."""
    dataset, settings = data.dataset, data.config.data.settings
    chosen = {*settings.get("categorical", ()), *(settings.get("levels") or {})}
    found: dict[str, dict[str, int]] = {}
    for feature, (name, text) in enumerate(zip(dataset.feature_names, dataset.feature_texts, strict=False)):
        if text is not None and name not in chosen:
            found.setdefault(name, {})[text] = feature
    return found


def _decimal_commas(data: Examined) -> Found | None:
    texts_of = {name: [*texts] for name, texts in _texts(data).items()}
    columns = {name: texts for name, texts in texts_of.items() if has_decimal_commas(texts) and not separator_of(texts)}
    if not columns:
        return None
    with_comma = [text for texts in columns.values() for text in texts if "," in text]
    has_points = _has_points(data)
    can_set = _is_setting(data, "decimal") and not has_points
    remedy = "use --set 'data.decimal=,'" if can_set else "write them with decimal points"
    if are_separated(with_comma, ","):
        remedy += f", or {_joined(data, ',')} if commas separate thousands"
    elif has_points:
        remedy += f", or {_joined(data, '.')} if points separate thousands"
    what = f"{_quoted(columns)}, such as '{with_comma[0]}'"
    return Found(num=len(columns), total=_num_columns(data), what=what, remedy=remedy)


def _thousands(data: Examined) -> Found | None:
    marks = {name: separator_of([*texts]) for name, texts in _texts(data).items()}
    columns = [name for name, mark in marks.items() if mark]
    if not columns:
        return None
    mark = marks[columns[0]]
    example = next(text for text in _texts(data)[columns[0]] if mark in text)
    remedy = _joined(data, mark)
    if mark == "." and _has_points(data):
        remedy = "write them without separators, as other columns have decimal points"
    return Found(
        num=len(columns),
        total=_num_columns(data),
        what=f"{_quoted(columns)}, such as '{example}'",
        remedy=remedy,
    )


def _joined(data: Examined, mark: str) -> str:
    """How to read numbers with a separator of thousands."""
    return f"use --set 'data.thousands={mark}'" if _is_setting(data, "thousands") else "write them without separators"


def _is_setting(data: Examined, name: str) -> bool:
    return name in plugins.names_of(data.config.data.kind, data.config.data.name)


def _has_points(data: Examined) -> bool:
    """Whether some column was read as numbers with decimal points; normalization is undone."""
    if data.config.data.settings.get("decimal") == ",":
        return False
    shift, scale = (torch.from_numpy(np.broadcast_to(each, data.sample.shape[1]).copy()) for each in data.normalization)
    columns = [feature for feature, text in enumerate(data.dataset.feature_texts) if text is None]
    values = (data.sample * scale + shift)[:, columns]
    # float32 loses the decimals of large numbers, and normalization some more
    return bool(((values - values.round()).abs() > 1e-3 + 1e-6 * values.abs().amax(dim=0)).any())


def _marked(data: Examined) -> Found | None:
    columns = {name: [*texts] for name, texts in _texts(data).items() if are_marked([*texts])}
    if not columns:
        return None
    example = next(text for texts in columns.values() for text in texts if bare(text) != text)
    return Found(
        num=len(columns),
        total=_num_columns(data),
        what=f"{_quoted(columns)}, such as '{example}'",
        remedy="write plain numbers in the file; numbers that are categories: --set "
        f"'data.categorical={extended(data, 'categorical', columns)}'",
    )


def _mixed_numbers(data: Examined) -> Found | None:
    columns = {name: texts for name, texts in _texts(data).items() if _are_mostly_numbers(texts)}
    if not columns:
        return None
    others = {
        name: _quoted(text for text in texts if not is_number(pointed(bare(text)))) for name, texts in columns.items()
    }
    shown = "; ".join(f"'{name}': {other or 'all numbers'}" for name, other in [*others.items()][:3])
    return Found(
        num=len(columns),
        total=_num_columns(data),
        what=shown + ("; ..." if len(columns) > 3 else ""),
        remedy="correct these texts in the file, or leave their rows out; numbers that are categories: --set "
        f"'data.categorical={extended(data, 'categorical', columns)}'",
    )


def _are_mostly_numbers(texts: Iterable[str]) -> bool:
    known = [*texts]
    num = sum(is_number(pointed(bare(text))) for text in known)
    return num >= max(_FEWEST_NUMBERS, len(known) - num) and not _are_numbers(known)


def _are_numbers(texts: Sequence[str]) -> bool:
    return has_decimal_commas(texts) or bool(separator_of(texts)) or are_marked(texts)


def _unique_texts(data: Examined) -> Found | None:
    """Columns of which most training samples have a text of their own, such as names."""
    train = data.fetched[0]
    if train is None or len(train) < _FEWEST:
        return None
    columns, num_texts = [], 0
    for name, texts in _texts(data).items():
        if 2 * len(texts) < len(train) or _NAMELESS.fullmatch(name):
            continue
        if _are_numbers([*texts]) or _are_mostly_numbers(texts):
            continue  # another rule's
        features = [*texts.values()]
        # a one-hot feature is never scaled by default, but may be by `data.normalize`
        num_samples = (train.features[:, features] == train.features[:, features].amax(dim=0)).sum(dim=0)
        if 2 * int((num_samples == 1).sum()) >= len(train):
            columns.append(features[0])
            num_texts = max(num_texts, len(texts))
    found = found_columns(data, columns)
    return found and found._replace(total=len(train), num=num_texts)


def _nameless(data: Examined) -> Found | None:
    names = {name: feature for feature, name in enumerate(data.dataset.feature_names)}
    columns = [] if _are_named(data) else [each for name, each in names.items() if _NAMELESS.fullmatch(name)]
    found = found_columns(data, columns)
    return found and found._replace(total=_num_columns(data))


def _numbering(data: Examined) -> Found | None:
    """See [Note: numbers of samples]."""
    train, names, texts = data.fetched[0], data.dataset.feature_names, data.dataset.feature_texts
    if not isinstance(data.dataset.train, Samples) or train is None or data.has_pixels or _are_named(data):
        return None
    columns = [
        each
        for each in data.varying.tolist()
        if not (texts and texts[each] is not None) and not (names and _NAMELESS.fullmatch(names[each]))
    ]
    scale = np.broadcast_to(data.normalization[1], data.sample.shape[1])
    columns = [each for each in columns if _are_different(data.sample[:_SAMPLED, each], scale[each])]
    columns = [each for each in columns if _is_numbering(train.features[:, each], scale[each])]
    found = found_columns(data, columns)
    return found and found._replace(
        remedy=f"{found.remedy}, or name all columns to keep in data.features" if names else found.remedy,
        low=len(train),
    )


def _is_numbering(values: Tensor, scale: float) -> bool:
    """Whether values are different whole numbers, too close together for chance."""
    span = float(values.max() - values.min()) * scale
    return len(values) ** 2 / 2 >= _UNLIKELY * span and _are_different(values, scale)


def _are_different(values: Tensor, scale: float) -> bool:
    """Whether values are different whole numbers, with normalization undone."""
    ordered = values.double().sort().values
    above_least = (ordered - ordered[0]) * scale
    is_whole = bool(((above_least - above_least.round()).abs() < 0.1).all())
    return is_whole and bool((above_least.diff() > 0.5).all())


def _are_named(data: Examined) -> bool:
    """Whether the user chose the columns."""
    return bool(data.config.data.settings.get("features"))


def _spelling(data: Examined) -> Found | None:
    """Classes, or texts of a column, that differ in case or white space alone."""
    found, remedies = [], []
    if data.has_classes:
        counts = dict(zip(data.dataset.class_names, _counts(data).tolist(), strict=True))
        for group in variants(data.dataset.class_names):
            found.append("classes " + ", ".join(f"'{name}' ({counts[name]:,})" for name in group))
        if found:
            remedies = [data.config.data.settings.get("target", "")]
    for name, texts in _texts(data).items():
        groups = variants(texts)
        found += [f"texts {_quoted(group)} of column '{name}'" for group in groups]
        remedies += [name] * bool(groups)
    if not found:
        return None
    named = next(filter(None, remedies), "")
    how = f", in pandas by table['{named}'].str.split().str.join(' ').str.lower()" if named else ""
    return Found(num=len(found), what="; ".join(found[:3]) + ("; ..." if len(found) > 3 else ""), remedy=how)


def _rare_classes(data: Examined) -> Found | None:
    """Classes of so few samples that they may be slips, or numbers of a quantity."""
    if not data.has_classes:
        return None
    names, counts = data.dataset.class_names, _counts(data)
    varied = {name for group in variants(names) for name in group}
    rare = [each for each in _rare(counts) if names[each] not in varied]
    if not rare or not (is_quantity(data) or counts.max() >= _FEWEST):
        return None
    shown = [f"'{names[each]}' ({counts[each]})" for each in rare]
    common = [name for name, num in zip(names, counts, strict=True) if num > _RARE]
    remedy = _as_quantity(data) if is_quantity(data) else _as_slips([names[each] for each in rare], common)
    return Found(
        num=len(rare),
        total=int(np.count_nonzero(counts)),
        what=", ".join(shown[:5]) + (", ..." if len(rare) > 5 else ""),
        remedy=remedy,
    )


def is_quantity(data: Examined) -> bool:
    """Whether classes may be the values of a quantity: many numbers, at least half of them rare."""
    counts = _counts(data)
    held = np.count_nonzero(counts)
    is_many = bool(held >= _FEWEST and 2 * len(_rare(counts)) >= held)
    return is_many and all(map(is_number, data.dataset.class_names))


def _counts(data: Examined) -> IntArray:
    train, test = data.class_counts
    return train + test


def _rare(counts: IntArray) -> list[int]:
    rare: list[int] = np.flatnonzero((counts > 0) & (counts <= _RARE)).tolist()
    return rare


def _as_quantity(data: Examined) -> str:
    regression = "--set task=regression --set 'metrics=[\"rmse\"]'"
    if "target_type" in data.config.data.settings:
        return f"for a quantity, use --set data.target_type=number {regression}"
    return f"for a quantity, give targets as floats, such as y.astype(float), and use {regression}"


def _as_slips(rare: Sequence[str], common: Sequence[str]) -> str:
    meant = ((name, difflib.get_close_matches(name, common, n=1, cutoff=_ALIKE)) for name in rare)
    slips = ", ".join(f"'{name}' ('{close[0]}'?)" for name, close in meant if close and not is_number(name))
    return f"{f'correct {slips}, ' if slips else ''}{'or ' if slips else ''}give them more samples, or leave them out"


def _num_columns(data: Examined) -> int:
    return len(set(data.dataset.feature_names))


def _quoted(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


RULES: tuple[DataRule, ...] = (
    data_rule(
        "decimal-commas",
        _decimal_commas,
        "{found.num} of {found.total} columns hold numbers with decimal commas, and were read as texts ({found.what})",
    ),
    data_rule(
        "thousands",
        _thousands,
        "{found.num} of {found.total} columns hold numbers with separators of thousands, and were read as texts "
        "({found.what})",
    ),
    data_rule(
        "marked-numbers",
        _marked,
        "{found.num} of {found.total} columns hold numbers with signs around or spaces in them, and were read as texts "
        "({found.what})",
    ),
    data_rule(
        "mixed-numbers",
        _mixed_numbers,
        "{found.num} of {found.total} columns hold numbers and other texts, and were read as texts ({found.what})",
    ),
    data_rule(
        "nameless-columns",
        _nameless,
        "{found.num} of {found.total} columns have no name in the header, as an index that pandas writes "
        "({found.what})",
        "{found.remedy}, or name them in the file",
    ),
    data_rule(
        "row-numbers",
        _numbering,
        "{found.num} of {found.total} features number the samples ({found.what}): all {found.low:,.0f} values are "
        "different whole numbers",
    ),
    data_rule(
        "unique-texts",
        _unique_texts,
        "{found.num:,} texts in {found.total:,} training samples make as many features ({found.what}), as names "
        "and ids do",
        "{found.remedy}, or write them as numbers if they are dates or quantities",
    ),
    data_rule(
        "spelling", _spelling, "{found.what} differ in case or white space only", "write each in one way{found.remedy}"
    ),
    data_rule(
        "rare-classes",
        _rare_classes,
        "{found.num} of {found.total} classes have 1 or 2 samples: {found.what}",
        holds_at_sites=False,
    ),
)
