"""lancebill inside other projects: one module for each."""
