"""Generators and checks for tests. They are part of the library, so that users can test their own formats."""
