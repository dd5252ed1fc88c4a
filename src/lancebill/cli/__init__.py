"""The command line: one module per command. Modules import torch inside functions, so that --help is fast."""
