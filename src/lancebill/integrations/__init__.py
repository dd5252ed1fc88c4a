"""Integrations of lancebill into other libraries, one package for each."""
