"""What a run needs with all layers, from two simulations with few of them.

Memory, FLOPs and time grow by the same amount with every repetition of a decoder's pattern of layers, as long as the
same moment of a phase is its peak: the line through two depths is exact then, and else a little low. With fewer than
three layers FSDP gathers fewer of them ahead than in a deep model.
"""

from collections.abc import Callable, Sequence

from torch import nn

from torchtune.modules.transformer import text_decoder
from torchtune.training.simulate._simulate import Simulation

# Depth of the first simulation, and what the second has more, at least.
FIRST, MORE = 3, 1


def two_depths(model: nn.Module) -> tuple[int, int] | None:
    """Two numbers of layers between which, and from which on to all, the pattern of layers repeats.

    Layers that come first and differ (dense ones before those with experts) are in both.

    Args:
        model: may be on the meta device.

    Returns:
        None if simulating two depths would take no less than simulating all layers.
    """
    kinds = [_kind(layer) for layer in text_decoder(model).layers]
    number, best = len(kinds), None
    for period in range(1, number // 2):
        unlike = [i for i in range(number - period) if kinds[i] != kinds[i + period]]
        first = max(FIRST, unlike[-1] + 1 if unlike else 0)
        first += (number - first) % period
        second = first + period * -(-MORE // period)
        if first + second < number and (best is None or second < best[1]):
            best = first, second
    return best


def _kind(layer: nn.Module) -> str:
    """What memory depends on: modules, and parameters with their shapes. A window only takes less FLOPs."""
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    parameters = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return repr((modules, parameters))


def extrapolate(two: Sequence[Simulation], depths: tuple[int, int], what: Callable[[Simulation], float]) -> float:
    """Continue the line through two depths to all layers."""
    (low, high), (before, after) = depths, map(what, two)
    return after + (two[0].layers - high) / (high - low) * (after - before)


def peak_of_all(two: Sequence[Simulation], depths: tuple[int, int]) -> float:
    """Bytes of a device with all layers: the highest of the phases, each of which is continued."""
    phases = two[1].observer.ledger.peaks()
    return max(extrapolate(two, depths, lambda one, name=name: _peak_in(one, name)) for name in phases)


def _peak_in(simulation: Simulation, phase: str) -> int:
    return simulation.observer.ledger.peaks()[phase].total
