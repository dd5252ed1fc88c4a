"""colibri inside other projects: one module for each."""
