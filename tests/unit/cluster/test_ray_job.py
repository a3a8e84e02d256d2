"""What `raybench sweep` does inside `ray job submit --working-dir`."""

import os
import subprocess
import sys

JOB = "version: 1\nname: small\nworkload: {kind: mlp}\nmatrix: {batch_size: 4}\n"


def test_a_relative_output_in_a_ray_job_is_refused_in_one_line(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    config = '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0d3a.zip"}}'
    done = subprocess.run(
        [sys.executable, "-m", "raybench", "sweep", "job.yaml"],
        cwd=tmp_path,
        env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": config},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("--output results: a Ray job's working directory is thrown away; give")
    assert not (tmp_path / "results").exists()
