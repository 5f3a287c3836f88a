# SPDX-License-Identifier: Apache-2.0
"""Runs beside one another: each is told of as it ends, one that hangs is stopped, and none begins without time."""

import subprocess
import sys
import time

import pytest
from project import ROOT

sys.path.append(str(ROOT / "scripts"))

from side_by_side import end_of, explained, run_side_by_side
from stored_results import write_whole

SCRIPT = """
import sys, time
label = sys.argv[sys.argv.index("--only") + 1]; print(label, flush=True)
time.sleep({"quick": 0.0, "hangs": 60.0, "hangs too": 60.0, "fails": 0.0}[label])
sys.exit(label == "fails")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, "utf-8")
    return str(path)


def test_a_run_that_hangs_is_stopped_after_the_others_were_told_of(script, capfd):
    ended, began = [], time.monotonic()
    failed = run_side_by_side(script, [], ["hangs", "quick", "fails"], 3, 1.0, ended.append, grace_seconds=1.0)
    assert 2.0 <= time.monotonic() - began < 20.0
    assert sorted(ended[:2]) == ["fails", "quick"]
    assert ended[2] == "hangs"
    assert sorted(failed) == ["fails", "hangs"]
    said = capfd.readouterr().err
    assert "hangs: stopped 1 s after the budget" in said
    assert "fails: ended with code 1, see above" in said
    assert 'script.py", line 4 in <module>' in said  # where it was
    with pytest.raises(SystemExit, match="these failed, see above: "):
        end_of(failed)
    end_of([])


TERMINATED = """
import sys
sys.path.append({scripts!r})
from process_ends import exit_on_sigterm
from side_by_side import run_side_by_side
exit_on_sigterm()
run_side_by_side({script!r}, [], ["hangs", "hangs too"], 2, 60.0)
"""


def test_runs_end_with_a_study_that_is_told_to_terminate(script):
    code = TERMINATED.format(scripts=str(ROOT / "scripts"), script=script)
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = study.stdout.readline() + study.stdout.readline()  # their names may come in one line
    assert begun.count("hangs") == 2
    study.terminate()
    _, said = study.communicate(timeout=30.0)  # until no run holds its end of the pipe
    assert study.returncode == 128 + 15
    assert said.count('script.py", line 4 in <module>') == 2


def test_no_run_begins_when_the_budget_is_spent(script):
    ended = []
    assert run_side_by_side(script, [], ["quick"], 1, 0.0, ended.append) == []
    assert ended == []


def test_a_file_whose_writing_fails_keeps_its_text(tmp_path):
    path = tmp_path / "new folder" / "found.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new" * 10**5 + "\ud800")
    assert path.read_text("utf-8") == "old"


def test_an_error_of_the_gpu_says_where_it_came_from():
    def product():
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    try:
        product()
    except RuntimeError as error:
        lines = explained(error).splitlines()
    assert lines[0] == "CUBLAS_STATUS_EXECUTION_FAILED"
    assert "test_studies_side_by_side.py" in lines[-1]
    assert lines[-1].endswith('product: raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")')
    assert explained(ValueError("an option")) == "an option"
