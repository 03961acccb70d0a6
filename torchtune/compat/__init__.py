"""Compatibility: functions for recipes copied from earlier releases, built on the current library.

The library itself does not use them. The table in ``_former_names`` leads former modules and names, of all packages, to
the present ones.
"""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
