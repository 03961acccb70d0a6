"""Compatibility: names of former experiments that are now part of the library."""
