"""Flower alone: its servers without the checks of accounts, keys, and signatures, for benchmarks.alone.doors."""

import runpy
import sys
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).parents[3] / "tests" / "impatient" / "sitecustomize.py"))
_command = " ".join(sys.orig_argv[:8])
if "door.py" in _command or "simulations.deployment.gate" in _command:
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    from fedsign.flower import door

    opened: Any = door
    opened.install = lambda: None
    opened.is_own = lambda scope: True
    opened.admit = opened.end = lambda *given: None
    opened.SignedRequests = NodeAuthHttpInterceptor
if "simulations.deployment.gate" in _command:
    from simulations.deployment.admission import Admission

    admission: Any = Admission
    admission.digest_of = lambda self, scope: ("", None)
