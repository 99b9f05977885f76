"""The checks of the data before the first round: rules with a remedy.

A rule that `refuses` is about data for which every result is meaningless; other findings are warnings.  A split that
was configured to be uneven, such as `dirichlet`, is no finding: its partition lacks the trait `is_even`.

Thresholds: with FedAvg on digits, features of a root mean square of 8 or of 0.008 at most train to chance; a linear
regression with targets around 10 diverges.
"""

import numpy as np

from fedsign.diagnosis import table
from fedsign.diagnosis.data_rule import DataRule, Found, data_rule, found_columns
from fedsign.diagnosis.examined import Examined
from fedsign.diagnosis.finding import Finding
from fedsign.errors import DataError
from fedsign.storage.results import Record
from fedsign.traits import PartitionTraits
from fedsign.workload import Workload

_APART = 100.0  # ratio of features' magnitudes
_LARGE, _SMALL = 5.0, 0.02  # root mean square, and largest value of all features
_DARK = 0.1  # largest pixel: 12 bits in files of 16 reach 0.0625
_SHARE = 0.01  # of samples that are duplicates
_GRAY_SHARE = 0.05  # ImageNet has 1 to 2 % of gray images


def run_check(workload: Workload) -> list[Record]:
    """Records of the findings; implements the extension point of this name.

    Raises:
        DataError: a rule refuses the data.
    """
    found = examine(workload)
    for rule, finding in found:
        if rule.refuses:
            raise DataError(str(finding))
    return [finding.record for _, finding in found]


def examine(workload: Workload, *, num_fetched: int = 32) -> list[tuple[DataRule, Finding]]:
    """All findings, also those of rules that refuse; `num_fetched` samples are fetched of a lazy data set."""
    if not len(workload.dataset.train):
        return []  # the data lie at sites, which examine them
    data = Examined(workload, num_fetched)
    return [(rule, finding) for rule in RULES for finding in rule.findings(data)]


def _only_class(data: Examined) -> Found | None:
    if not data.has_classes or np.count_nonzero(counts := data.class_counts[0]) != 1:
        return None
    return Found(num=int(counts.sum()), what=data.dataset.class_names[int(counts.argmax())], remedy=_target(data))


def _only_test_class(data: Examined) -> Found | None:
    if not data.has_classes:
        return None
    train, test = data.class_counts
    if np.count_nonzero(test) != 1 or np.count_nonzero(train) < 2 or test.sum() < 2:
        return None
    return Found(
        num=int(test.sum()), total=int(np.count_nonzero(train)), what=data.dataset.class_names[int(test.argmax())]
    )


def _only_target(data: Examined) -> Found | None:
    targets = data.dataset.train.targets
    if not data.has_real_targets or len(targets) < 2 or bool((targets != targets[0]).any()):
        return None
    return Found(num=len(targets), low=float(targets[0]), remedy=_target(data))


def _target(data: Examined) -> str:
    return "name another column with --set data.target=COLUMN, or " if "target" in data.config.data.settings else ""


def _first_label(data: Examined) -> Found | None:
    """Numbered classes, of which the first have no samples."""
    if not data.has_classes:
        return None
    names, held = data.dataset.class_names, sum(data.class_counts)
    first = int(np.flatnonzero(held)[0])
    return Found(num=first, total=len(names) - 1) if first and names == _numbers(len(names)) else None


def _empty_classes(data: Examined) -> Found | None:
    if not data.has_classes or _first_label(data) or _only_class(data) or table.is_quantity(data):
        return None
    names, (train, test) = data.dataset.class_names, data.class_counts
    empty = np.flatnonzero(train == 0)
    if not len(empty) or len(empty) == len(names):
        return None
    shown = ", ".join(f"'{names[label]}'" for label in empty[:5]) + (", ..." if len(empty) > 5 else "")
    if test[empty].any():
        remedy = "give the training samples some of them, or leave them out of the test"
    elif data.config.data.settings.get("class_names"):
        remedy = "leave out of data.class_names what no client has"
    else:
        remedy = "number the classes without gaps, or ignore this if later data have them"
    return Found(num=len(empty), total=len(names), what=shown, remedy=remedy)


def _numbers(num: int) -> tuple[str, ...]:
    return tuple(str(label) for label in range(num))


def _apart(data: Examined) -> Found | None:
    """Features of which both the root mean squares and the largest values are far apart.

    Both: rare indicators have a small root mean square, and heavy tails large values, at a scale that is right.
    """
    columns, varying = data.columns, data.varying
    if columns is None or len(varying) < 2:
        return None
    rms, size = columns.rms[varying], columns.size[varying]
    if min(rms.max() / rms.min(), size.max() / size.min()) < _APART or (data.sample.ndim == 2 and data.has_pixels):
        return None
    ends = [f"{_short(rms[end])} ({data.named([int(varying[end])])})" for end in (rms.argmin(), rms.argmax())]
    return Found(what=" to ".join(ends), remedy=_scaled(data, "per_channel"))


def _off_scale(data: Examined) -> Found | None:
    """Features that are all together far from the magnitude 1."""
    columns = data.columns
    if columns is None or not len(data.varying) or _apart(data):
        return None
    overall = float(np.sqrt(np.square(columns.rms).mean()))
    if overall <= _LARGE and columns.size.max() >= (_DARK if data.sample.ndim == 4 else _SMALL):
        return None
    found = Found(low=columns.low.min(), high=columns.high.max(), what=_short(overall))
    return found._replace(remedy=_scaled(data, "unit" if data.has_pixels else "per_channel"))


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _scaled(data: Examined, preset: str) -> str:
    if data.workload.client_data is not None:
        return (
            "scale them at every site by the same numbers: --set data.normalize=constants with data.mean and data.std"
        )
    return f"use --set data.normalize={preset}"


def _target_scale(data: Examined) -> Found | None:
    targets = data.dataset.train.targets
    if not data.has_real_targets:
        return None
    rms, mean = float(targets.double().square().mean().sqrt()), float(targets.double().mean())
    if rms <= _LARGE:
        return None
    can_scale = "scale_target" in data.config.data.settings
    remedy = (
        "use --set data.scale_target=true" if can_scale else "subtract their mean and divide them by their deviation"
    )
    return Found(low=mean, high=rms, remedy=remedy)


def _repeated(data: Examined) -> Found | None:
    found = data.repeated
    named = found_columns(data, list(found))
    verb = "equals" if len(found) == 1 else "equal"
    return named and named._replace(what=f"{named.what} {verb} {data.named(sorted(set(found.values())))}")


def _shared(data: Examined) -> Found | None:
    found = _many(data, data.num_shared, len(data.keys[1]), "test")
    settings = data.config.data.settings
    if found and settings.get("test_path") and settings.get("test_path") == settings.get("path"):
        return found._replace(remedy="name a file of other rows with --set data.test_path=PATH")
    return found and found._replace(remedy="take them out of the one or the other; one file: each sample once")


def _many(data: Examined, num: int, total: int, part: str) -> Found | None:
    if num <= max(2, _SHARE * total) or (data.dataset.text is None and data.has_few_values):
        return None
    return Found(num=num, total=total, what=part)


def _gray(data: Examined) -> Found | None:
    num, total = data.gray
    few = min(num, total - num)
    return Found(num=num, total=total, remedy=_one_mode(data)) if few and few >= _GRAY_SHARE * total else None


def _one_mode(data: Examined) -> str:
    if data.config.data.settings.get("channels") == 3:
        return "use --set data.channels=1, which makes all of them gray, or give them one mode"
    return "make all of them gray or all of them color"


def _small_clients(data: Examined) -> Found | None:
    batch, num_samples = data.config.client.batch_size, len(data.dataset.train)
    # a batch of all samples or more is meant to be the whole client
    if not _is_even(data) or batch >= num_samples:
        return None
    sizes = data.client_sizes
    small, smallest = int((sizes < batch).sum()), int(sizes.min())
    if not small:
        return None
    remedy = f"use --set client.batch_size={smallest} or --set partition.num_clients={num_samples // batch}"
    return Found(num=small, total=len(sizes), low=smallest, remedy=remedy)


def _single_class_clients(data: Examined) -> Found | None:
    if not (_is_even(data) and data.has_classes) or _only_class(data):
        return None
    return Found(num=data.num_single_class, total=len(data.client_sizes)) if data.num_single_class else None


def _is_even(data: Examined) -> bool:
    return PartitionTraits.of(data.config.partition.name).is_even


RULES: tuple[DataRule, ...] = (
    data_rule(
        "one-class",
        _only_class,
        "all {found.num:,} training samples have the class '{found.what}', so that a model which always says it is "
        "right",
        "{found.remedy}give samples of at least two classes",
        refuses=True,
        holds_at_sites=False,
    ),
    data_rule(
        "one-target",
        _only_target,
        "all {found.num:,} training samples have the target {found.low:g}, so that there is nothing to learn",
        "{found.remedy}give samples with different targets",
        refuses=True,
        holds_at_sites=False,
    ),
    data_rule(
        "unreadable-sample",
        lambda data: data.fetched[2],
        "a sample cannot be fetched ({found})",
        "correct it, or leave it out",
    ),
    data_rule(
        "one-test-class",
        _only_test_class,
        "all {found.num:,} test samples have the class '{found.what}', the training samples {found.total} classes",
        "give test samples of all classes",
        holds_at_sites=False,
    ),
    data_rule(
        "first-label",
        _first_label,
        "labels are from {found.num} to {found.total}, and the model has outputs from 0 that no sample has",
        "subtract {found.num} from all labels",
        holds_at_sites=False,
    ),
    data_rule(
        "empty-classes",
        _empty_classes,
        "{found.num} of {found.total} classes have no training samples: {found.what}",
        holds_at_sites=False,
    ),
    data_rule(
        "feature-scales",
        _apart,
        "features are orders of magnitude apart, with root mean squares from {found.what}",
    ),
    data_rule(
        "feature-range",
        _off_scale,
        "features are from {found.low:.3g} to {found.high:.3g}, with a root mean square of {found.what}, and models "
        "expect about 1",
    ),
    data_rule(
        "target-range",
        _target_scale,
        "targets have the mean {found.low:.3g} and the root mean square {found.high:.3g}, and models expect about 1",
    ),
    *table.RULES,
    data_rule(
        "constant-features",
        lambda data: found_columns(data, data.constant.tolist()),
        "{found.num} of {found.total} features have one value in all training samples ({found.what})",
    ),
    data_rule("duplicate-features", _repeated, "{found.num} of {found.total} features repeat others ({found.what})"),
    data_rule(
        "duplicate-samples",
        lambda data: _many(data, data.num_duplicates, len(data.keys[0]), "training"),
        "{found.num:,} of {found.total:,} training samples repeat others, feature by feature",
        "leave out what was copied, or ignore this if equal samples are to be expected",
    ),
    data_rule(
        "test-overlap",
        _shared,
        "{found.num:,} of {found.total:,} test samples are training samples, too, so that test metrics are too good",
    ),
    data_rule(
        "image-modes",
        _gray,
        "{found.num:,} of {found.total:,} images examined are gray, the others in color",
    ),
    data_rule(
        "constant-images",
        lambda data: Found(num=data.blank[0], total=data.blank[1]) if data.blank[0] else None,
        "{found.num:,} of {found.total:,} training images have one value in all pixels",
        "look at some of them as the model receives them (workload.dataset.train.features), and correct or remove them",
    ),
    data_rule(
        "small-clients",
        _small_clients,
        "{found.num:,} of {found.total:,} clients have fewer samples than "
        "client.batch_size={config.client.batch_size}, the smallest {found.low:.0f}",
    ),
    data_rule(
        "single-class-clients",
        _single_class_clients,
        "{found.num:,} of {found.total:,} clients have samples of one class, though "
        "partition.name={config.partition.name} deals classes evenly",
        "lower partition.num_clients={config.partition.num_clients}, or give samples of the rare classes",
    ),
)
