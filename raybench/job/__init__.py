"""What is asked: a job file becomes points."""
