"""Compatibility: a switch of the expert layers that recipes copied from earlier releases set.

Products of grouped rows choose their kernel by device and dtype; the switch changes nothing.
"""

use_grouped_mm = True


def should_use_grouped_mm() -> bool:
    """What :data:`use_grouped_mm` was set to."""
    return use_grouped_mm
