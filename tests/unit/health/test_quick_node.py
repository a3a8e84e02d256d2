"""The process of a quick check that looks at its node."""

import subprocess
import sys
import time

import pytest

from raybench.health.quick.children import ask, end_all, start_node_process
from raybench.health.quick.messages import LookAround


@pytest.fixture
def look():
    """Ask the process, which counts this test and its children as the check."""
    node = start_node_process()

    def ask_node():
        answers = ask({node: LookAround()}, time.monotonic() + 60.0)
        return answers.received[node]

    yield ask_node
    end_all([node])


def test_busy_program_of_another_is_named(look):
    # Its parent ends at once, so that the program is no child of the check.
    start = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'while 1: pass'], "
        "stdout=subprocess.DEVNULL).pid)"
    )
    hog = int(subprocess.check_output([sys.executable, "-c", start], text=True))
    try:
        before = look()
        deadline_s = time.monotonic() + 30.0
        spent_s = {}
        while hog not in spent_s and time.monotonic() < deadline_s:
            time.sleep(1.0)
            after = look()
            spent_s = {one.process_id: used_s for one, used_s in after.programs if used_s > 0}
        assert spent_s[hog] > 0
        assert after.busy_s > before.busy_s
        [program] = [one for one, _ in after.programs if one.process_id == hog]
        assert program.name.startswith("python")
        assert program.user
        assert program.since
    finally:
        subprocess.run(["kill", "-9", str(hog)], check=True)


def test_own_processor_time_is_no_load_of_others(look):
    before = look()
    began_s = time.process_time()
    while time.process_time() < began_s + 0.5:
        pass
    assert look().own_s - before.own_s > 0.4
