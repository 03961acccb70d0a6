from torchtune.modules.peft.lora import LoRAGroupedExperts as LoRAGroupedExperts

from .balance import BalancingLoss as BalancingLoss
from .balance import ExpertLoad as ExpertLoad
from .balance import LossFreeBalancing as LossFreeBalancing
from .balance import load_balancing_loss as load_balancing_loss
from .balance import tokens_per_expert as tokens_per_expert
from .experts import ClampedExperts as ClampedExperts
from .experts import GroupedExperts as GroupedExperts
from .experts import UngatedExperts as UngatedExperts
from .moe import MoE as MoE
from .moe import TokenChoiceTopKRouter as TokenChoiceTopKRouter
