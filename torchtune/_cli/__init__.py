"""The command line ``tune``."""
