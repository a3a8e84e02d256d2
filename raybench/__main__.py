"""`python -m raybench`."""

from raybench.cli import main

main()
