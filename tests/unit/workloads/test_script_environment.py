"""Which variables of a worker a script inherits."""

import os
import subprocess
import sys

from raybench.hangs import responder
from raybench.workloads.scripts import running


def test_workers_own_settings_stay_with_the_worker():
    of_worker = {"RAY_JOB_ID": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "NCCL_ALGO": "Ring"}
    assert running.inherited_variables(of_worker) == {"NCCL_ALGO": "Ring"}


def test_the_users_ras_address_is_inherited():
    users = {"NCCL_RAS_ADDR": "10.0.0.1:4000"}
    assert running.inherited_variables(users) == users


def test_the_workers_ras_address_stays_with_the_worker():
    names = responder.RAS_VARIABLE, responder.CHOSEN_RAS_VARIABLE
    assert names == (running.RAS_VARIABLE, running.CHOSEN_RAS_VARIABLE)
    code = (
        "import json, os; from raybench.hangs import responder; responder.choose_ras_address();"
        "from raybench.workloads.scripts.running import inherited_variables;"
        f"kept = inherited_variables(os.environ); print([name in kept for name in {names!r}])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in names}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.strip() == "[False, False]"
