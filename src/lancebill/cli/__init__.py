"""The command line: one file for each command, heavy imports only inside them."""
