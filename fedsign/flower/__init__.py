"""The only room of `fedsign` that imports Flower.

Importing it turns Flower's telemetry off, unless the environment says otherwise: a laboratory that runs
on private data should not call home by default.
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
