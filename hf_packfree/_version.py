"""The version: one literal, so that building needs no torch."""

__version__ = "0.2.0"
