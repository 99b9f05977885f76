"""The controls of a regularizer: runs without one of its parts, or with a simple explanation of its gain alone.

[Note: controls] A control has the rounds, clients, splits and seeds of the regularizer.  Its settings are fixed in
advance: matched to the regularizer where possible, never tuned.  There are three groups:

    parts       one part replaced or removed, everything else unchanged
    size        only the effect on the norm of the weights, or of a round's update; and the reverse, the regularizer
                at FedAvg's norms
    settings    plain settings of FedAvg: larger initial weights, sharper logits, another learning rate

A control with held norms follows a run of the same seed round by round, so it runs after that one.  The regularizer
on top of a control is not a rival: it is compared with that control.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

FEDAVG: Final = "fedavg"
Norms = Literal["weight_norms", "update_norms"]
Group = Literal["reference", "parts", "size", "settings"]
GROUPS: Final[Mapping[Group, str]] = {
    "reference": "Reference",
    "parts": "Ablated parts",
    "size": "Size alone",
    "settings": "Plain settings of FedAvg",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """One row: its difference from the experiment, whose strategy is the regularizer."""

    key: str
    label: str
    group: Group
    text: str  # the replacement, in a few words
    changes: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms | None = None  # the norms that are held
    like: str = ""  # key of the row that provides these norms
    base: str = ""  # key of the row to which the regularizer is added

    @property
    def is_rival(self) -> bool:
        """Whether the control competes with the regularizer for a share of the gain."""
        return self.group != "reference" and not self.base


@dataclass(frozen=True, kw_only=True, slots=True)
class AblatedMethod:
    """The target of an ablation, to which controls are matched."""

    strategy: str
    label: str
    settings: Mapping[str, Any]  # the strategy's
    objective: Mapping[str, Any]  # the clients' objective and its settings, as arguments of `control`
    lr: float
    momentum: float | None  # None: the optimizer has none
    rms: float  # root mean square of the initial weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Essential:
    """The control that isolates the regularizer's own idea."""

    key: str
    part: str  # what the control lacks; completes "the gain needs ..."


_NORMS: Final[Mapping[Norms, str]] = {"weight_norms": "weight norms", "update_norms": "update norms"}

ESSENTIAL: Final[Mapping[str, Essential]] = {
    "fedsign": Essential(key="own-sign", part="the received signs"),
    "fedprox": Essential(key="update-norms", part="a pull to the received model, beyond shorter steps"),
    "feddyn": Essential(key="pull", part="the clients' linear terms and the server's memory"),
    "moon": Essential(key="received-part", part="the push away from the client's previous model"),
}
_ANY = Essential(key="weight-norms", part="more than the norms of the weights")


def essential(strategy: str) -> Essential:
    """The essential control of a strategy; for a user's own strategy, the one at its weight norms."""
    return ESSENTIAL.get(strategy, _ANY)


def controls_of(method: AblatedMethod) -> list[Control]:
    """FedAvg, the regularizer, and the controls, group by group."""
    own = {"fedsign": _fedsign, "fedprox": _fedprox, "feddyn": _feddyn, "moon": _moon}.get(method.strategy)
    return [
        Control(key=FEDAVG, label="FedAvg", group="reference", text="no regularizer", changes=_fedavg()),
        Control(key=method.strategy, label=method.label, group="reference", text="as configured"),
        *([] if own is None else own(method)),
        *_size(method),
        *_settings(method),
    ]


def _fedavg(**changes: Any) -> dict[str, Any]:
    return {"strategy.name": FEDAVG, **changes}


def control(objective: str, **settings: Any) -> dict[str, Any]:
    """FedAvg's server with another local objective."""
    return {"strategy.name": "control", "strategy.objective": objective, "strategy.settings": settings}


def _fedsign(method: AblatedMethod) -> list[Control]:
    gamma, reduction = method.settings["gamma"], method.settings["reduction"]
    decay = gamma / (4 * method.rms)  # sigma' = 1/4 at 0: as strong as the first push on a weight of average size

    def push(key: str, label: str, group: Group, text: str, *, sign: str, form: str, gamma: float = gamma) -> Control:
        changes = control("sign_push", sign=sign, form=form, gamma=gamma, reduction=reduction)
        return Control(key=key, label=label, group=group, text=text, changes=changes)

    return [
        push(
            "received-sign",
            "constant push",
            "parts",
            "gamma / 4 along sign(θₜ), no sigmoid",
            sign="received",
            form="linear",
        ),
        push("own-sign", "own sign", "parts", "sign(θ) in place of sign(θₜ)", sign="own", form="sigmoid"),
        push(
            "random-sign",
            "random sign",
            "parts",
            "a fixed draw in place of sign(θₜ)",
            sign="random",
            form="sigmoid",
        ),
        push("negative-l1", "negative L1", "size", f"penalty −{gamma / 4:.3g} |θ|", sign="own", form="linear"),
        push(
            "negative-decay",
            "negative weight decay",
            "size",
            f"{decay:.3g}, as strong as the first push",
            sign="own",
            form="square",
            gamma=decay,
        ),
    ]


def _fedprox(method: AblatedMethod) -> list[Control]:
    mu = method.settings["mu"]
    return [
        Control(
            key="decay",
            label="weight decay",
            group="parts",
            text=f"{mu:g}: the pull is to 0, not to θₜ",
            changes=_fedavg(**{"client.weight_decay": mu}),
        ),
        _half_lr(method),
    ]


def _feddyn(method: AblatedMethod) -> list[Control]:
    alpha = method.settings["alpha"]
    return [
        Control(
            key="pull",
            label="pull alone",
            group="parts",
            text=f"FedProx with mu {alpha:g}",
            changes={"strategy.name": "fedprox", "strategy.mu": alpha},
        ),
        Control(
            key="clients",
            label="clients alone",
            group="parts",
            text="the server averages, without its state",
            changes=control("feddyn", alpha=alpha),
        ),
        Control(
            key="server",
            label="server momentum",
            group="parts",
            text="0.5, in place of the server's memory",
            changes=_fedavg(**{"server.optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.5}}),
        ),
    ]


def _moon(method: AblatedMethod) -> list[Control]:
    settings = {name: method.settings[name] for name in ("mu", "temperature")}
    return [
        Control(
            key=f"{part}-part",
            label=label,
            group="parts",
            text="the other term of the contrastive loss is left out",
            changes=control("moon_part", part=part, **settings),
        )
        for part, label in (("received", "pull to the received"), ("previous", "push from the previous"))
    ]


def _half_lr(method: AblatedMethod) -> Control:
    return Control(
        key="half-lr",
        label="half the learning rate",
        group="parts",
        text=f"FedAvg with lr {method.lr / 2:g}",
        changes=_fedavg(**{"client.lr": method.lr / 2}),
    )


def _size(method: AblatedMethod) -> list[Control]:
    held = [
        Control(
            key=name.replace("_", "-"),
            label=f"FedAvg at {method.label}’s {words}",
            group="size",
            text="round by round, seed by seed",
            changes=control("plain"),
            norms=name,
            like=method.strategy,
        )
        for name, words in _NORMS.items()
    ]
    if method.objective:
        held.append(
            Control(
                key="at-fedavg-norms",
                label=f"{method.label} at FedAvg’s weight norms",
                group="size",
                text="the term stays, the growth is taken away",
                changes=control(method.objective["objective"], **method.objective["settings"]),
                norms="weight_norms",
                like=FEDAVG,
            )
        )
    return held


def _settings(method: AblatedMethod) -> list[Control]:
    def row(key: str, label: str, text: str, **changes: Any) -> Control:
        return Control(key=key, label=label, group="settings", text=text, changes=changes)

    rows = [
        row(f"init-{scale}", f"initial weights × {scale}", "FedAvg", **_fedavg(**{"model.init_scale": float(scale)}))
        for scale in (2, 3)
    ]
    rows.append(
        Control(
            key="on-init-3",
            label=f"{method.label} on initial weights × 3",
            group="settings",
            text="what the term adds there",
            changes={"model.init_scale": 3.0},
            base="init-3",
        )
    )
    rows.append(row("sharp", "logits × 2", "temperature 0.5 in the loss", **_fedavg(**{"client.temperature": 0.5})))
    rows.append(
        row("double-lr", "learning rate × 2", f"lr {2 * method.lr:g}", **_fedavg(**{"client.lr": 2 * method.lr}))
    )
    if method.momentum is not None:
        momentum = 0.5 if method.momentum != 0.5 else 0.9
        # a constant gradient moves lr / (1 - momentum) per step; keep that equal
        lr = round(method.lr * (1 - momentum) / (1 - method.momentum), 6)
        changes = _fedavg(**{"client.lr": lr, "client.optimizer.momentum": momentum})
        rows.append(
            row("momentum", f"momentum {momentum:g}", f"lr {lr:g}: the same step of a constant gradient", **changes)
        )
    return rows
