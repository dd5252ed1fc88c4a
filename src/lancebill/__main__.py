"""`python -m lancebill`: the command, where it is not on the path."""

from lancebill.cli.main import main

main()
