"""Tuning data of the Ampere backend, and how plans use it."""
