"""Each test file needs a tool with an environment of its own: `make test-tools`. Other runs skip them."""
