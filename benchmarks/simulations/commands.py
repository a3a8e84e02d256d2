"""Run the real commands in this process."""

from click.testing import CliRunner

from raybench.cli import raybench


def run_command(*words: object) -> tuple[int, str]:
    """Run `raybench WORDS`; return its exit code and stdout."""
    done = CliRunner().invoke(raybench, list(map(str, words)), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value or 0), done.stdout
