"""Imports what recipes import, for a process that forks them."""

import gc

from tests.recipes.forker import import_rooms

import_rooms()
gc.enable()  # in its children, too
