"""Per-client metrics: each round's losses and update norms by client, and the accuracy on each client's labels."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="metrics of each client in each round, and accuracy by client on the page of a run",
    modules=("fedsign.client_metrics",),
    sections={"results": "fedsign.client_metrics.section:ClientMetricsKeys"},
    extends={
        "report_section": "fedsign.client_metrics.report:section",
        "round_hook": "fedsign.client_metrics.recording:round_hook",
    },
)
