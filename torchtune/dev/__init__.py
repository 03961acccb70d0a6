"""Compatibility: names of experiments of earlier releases that are part of the library now."""
