"""Synthetic(alpha, beta): the moments and the dependence that the paper's model implies."""

import numpy as np
import pytest
import torch

from fedsign.data.synthetic import synthetic


def by_owner(data, num_owners):  # type: ignore[no-untyped-def]
    both = [
        torch.cat(pair)
        for pair in zip(*((p.features, p.targets, p.owners) for p in (data.train, data.test)), strict=True)
    ]
    return [(both[0][both[2] == owner].double(), both[1][both[2] == owner]) for owner in range(num_owners)]


def test_features_have_the_papers_moments() -> None:
    """Within an owner, feature j has variance j^-1.2: with n = 20,000 the relative error is sqrt(2 / n) = 1 %, 5 of it
    allowed.  Owners' centers are N(B_k, 1): a spread of 1 over the 60 features, and B_k = 0 for beta = 0."""
    data = synthetic(0, beta=0.0, num_owners=3, min_size=20_000, log_size=0.0, log_size_std=0.0)
    for features, _ in by_owner(data, 3):
        np.testing.assert_allclose(features.var(dim=0), np.arange(1, 61) ** -1.2, rtol=0.05)
        center = features.mean(dim=0)
        assert abs(center.mean()) < 4 / 60**0.5 and 0.7 < center.std() < 1.35, "5 standard errors of n = 60"


def test_beta_moves_the_owners_apart() -> None:
    """The mean of an owner's center is B_k ~ N(0, beta^2), plus N(0, 1 / 60)."""
    for beta, low, high in ((0.0, 0.08, 0.2), (10.0, 7.0, 13.5)):
        data = synthetic(1, beta=beta, num_owners=60, min_size=50, log_size_std=0.0)
        spread = np.std([features.mean() for features, _ in by_owner(data, 60)])
        assert low < spread < high


def test_labels_follow_a_linear_model_of_the_owners_own() -> None:
    """arg max of a linear map can be learned per owner far better than for all owners together."""
    from sklearn.linear_model import LogisticRegression

    data = synthetic(0, num_owners=6, min_size=1000, log_size=0.0, log_size_std=0.0)
    owners = [(x, y) for x, y in by_owner(data, 6) if len(y.unique()) > 1]  # a far center can leave one class alone
    assert len(owners) >= 3
    own = [LogisticRegression(C=100, max_iter=1000).fit(x, y) for x, y in owners]
    assert min(model.score(x, y) for model, (x, y) in zip(own, owners, strict=True)) > 0.95
    assert max(own[0].score(x, y) for x, y in owners[1:]) < 0.6


def test_iid_owners_share_one_model_and_center() -> None:
    from sklearn.linear_model import LogisticRegression

    data = synthetic(0, iid=True, num_owners=4, min_size=1500, log_size=0.0, log_size_std=0.0)
    (x, y), *others = by_owner(data, 4)
    model = LogisticRegression(C=1e3, max_iter=3000).fit(x, y)
    assert min(model.score(*other) for other in others) > 0.85
    assert abs(x.mean(dim=0)).max() < 5 / 1500**0.5, "v = 0"


def test_sizes_are_lognormal_from_the_minimum() -> None:
    """log(size - 50) ~ N(4, 2^2), rounded down: the median of 300 owners is within 5 standard errors of e^4 = 54.6."""
    data = synthetic(0, num_owners=300)
    sizes = np.array([len(targets) for _, targets in by_owner(data, 300)])
    assert sizes.min() >= 50
    assert abs(np.median(np.log(np.maximum(sizes - 50, 1))) - 4) < 5 * 1.2533 * 2 / 300**0.5
    assert sizes.max() > 1000


def test_every_owner_has_training_and_test_samples_of_its_own() -> None:
    data = synthetic(0, num_owners=20, min_size=2, log_size=0.0, log_size_std=0.0, test_fraction=0.9)
    assert data.train.owners is not None and data.test.owners is not None
    assert set(data.train.owners.tolist()) == set(data.test.owners.tolist()) == set(range(20))
    assert data.train.owners.dtype == torch.int64


def test_an_owners_samples_do_not_depend_on_the_number_of_owners() -> None:
    few, many = (by_owner(synthetic(3, num_owners=num), num) for num in (2, 5))
    assert torch.equal(few[1][0], many[1][0]) and torch.equal(few[1][1], many[1][1])
    assert not torch.equal(few[1][0][:40], many[2][0][:40])


@pytest.mark.parametrize("iid", [True, False])
def test_the_seed_decides(iid: bool) -> None:
    first, again, other = (synthetic(seed, iid=iid, num_owners=3) for seed in (0, 0, 1))
    assert torch.equal(first.train.features, again.train.features)
    assert not torch.equal(first.train.features[:50], other.train.features[:50])
