"""Compatibility: a switch that recipes copied from earlier releases set.

The switch has no effect: grouped matrix products choose their kernel by device and dtype.
"""

use_grouped_mm = True


def should_use_grouped_mm() -> bool:
    """Return :data:`use_grouped_mm`."""
    return use_grouped_mm
