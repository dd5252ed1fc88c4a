"""`python -m colibri`: the command, where it is not on the path."""

from colibri.cli.main import main

main()
