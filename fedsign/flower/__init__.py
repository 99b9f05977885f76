"""The only package of `fedsign` that imports Flower.

Importing it disables Flower's telemetry, unless the environment enables it: a laboratory that runs on private data
should not call home by default.
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
