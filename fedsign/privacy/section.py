"""The configuration table [privacy]."""

from fedsign.sections import Part


class PrivacyPart(Part):
    """Differential privacy of the clients (`fedsign.privacy`)."""

    kind = "privacy"
    name: str = "none"
