"""The configuration tables [attack] and [faults]."""

from fedsign.errors import ConfigError
from fedsign.sections import Fraction, NonNegativeReal, Part, Section


class AttackPart(Part):
    """What malicious clients send, and their share of the population (`clients.robustness.attack`)."""

    kind = "attack"
    name: str = "none"
    fraction: Fraction = 0.2

    def check(self) -> None:
        """Check that a share of attackers comes with an attack."""
        if self.fraction != type(self)().fraction and not self.is_chosen:
            raise ConfigError(
                f"attack.fraction={self.fraction:g} was given with attack.name=none, so that nobody would attack; "
                "name the "
                "attack, or leave attack.fraction out."
            )


class FaultsSection(Section):
    """Rates of injected faults per client and round, and the delay of late clients (`clients.robustness.faults`)."""

    crash_rate: Fraction = 0.0
    delay_rate: Fraction = 0.0
    delay_s: NonNegativeReal = 5.0
    nan_rate: Fraction = 0.0
    drop_rate: Fraction = 0.0

    @property
    def any(self) -> bool:
        """Whether any rate is positive."""
        return any((self.crash_rate, self.delay_rate, self.nan_rate, self.drop_rate))

    def check(self) -> None:
        """Check that a delay comes with a rate."""
        if self.delay_s != type(self)().delay_s and not self.delay_rate:
            raise ConfigError(
                f"faults.delay_s={self.delay_s:g} was given with faults.delay_rate=0, so that nobody would be late; "
                "set the "
                "rate, or leave faults.delay_s out."
            )
