"""`python -m jem_robust` is the command line too."""

from jem_robust.cli import main

main()
