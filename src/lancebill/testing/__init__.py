"""Generators and checks that ship with the library, so that users can run them too."""
