"""`python -m lancebill` runs the `lancebill` command."""

from lancebill.cli.main import main

main()
