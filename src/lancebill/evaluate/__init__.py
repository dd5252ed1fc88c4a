"""Measures models: perplexity, exact match, tests for the significance of differences, and servers under load."""
