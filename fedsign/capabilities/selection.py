"""Selection: the best model by validation, kept besides the last, and early stopping."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="the best model by validation, kept besides the last, and early stopping",
    modules=("fedsign.selection",),
    sections={"results": "fedsign.selection.section:SelectionKeys"},
    extends={
        "outcome": "fedsign.selection.best:outcome",
        "report_section": "fedsign.selection.report:section",
        "round_hook": "fedsign.selection.best:round_hook",
    },
)
