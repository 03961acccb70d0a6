"""Conversion that adds LoRA adapters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from torch import Tensor, nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    nearest_module_names,
)
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.peft._adapters import (
    ATTENTION_TARGETS,
    LORA_ATTN_MODULES,
    MIXER_INPUTS,
    MLP_MODULES,
    get_adapter_params,
    set_trainable_params,
)
from torchtune.modules.peft._functional import lora_scaling
from torchtune.modules.peft.dora import DoRALinear
from torchtune.modules.peft.lora import AdapterStart, LoRALinear, check_adapter_numbers
from torchtune.modules.peft.lora_experts import LoRAGroupedExperts
from torchtune.modules.stored_linear import StoredLinear

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle

_TIED = (
    "LoRA: the projection '{}' is tied to the token embedding of this model and cannot have an adapter of its own, "
    "leave it out (apply_to_output or apply_lora_to_output: False)."
)


class LoRA(Conversion):
    """Conversion that freezes a model and adds LoRA adapters to its target modules.

    Choose target modules with ``attn_modules``, ``apply_to_mlp`` and ``apply_to_output``, or with ``target_modules``.

    Args:
        rank: rank of the adapters.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapters' input, in training.
        attn_modules: projections of attention: q_proj, k_proj, v_proj, output_proj; ``None``: all four. In a mixer that
            replaces or accompanies attention, each of the first three means its input projection; in latent attention,
            k_proj and v_proj mean kv_down_proj and kv_proj, and q_proj also q_down_proj.
        apply_to_mlp: also adapt w1, w2, w3 of every MLP, or its experts.
        apply_to_output: also adapt the output projection; it must not be tied to the embedding.
        target_modules: :mod:`fnmatch` patterns of module paths, or of their ends: ``q_proj``, ``mlp.w*``,
            ``layers.[01].attn.*``.
        use_dora: train the magnitude of the adapted weight's rows separately (DoRA).
        init: ``"pissa"`` or ``"olora"``: initialize the adapter from its base weight, and subtract it from the base
            while the checkpoint is loaded, before quantization. By default A is random and B zero.
        use_rslora: scale the update by alpha / sqrt(rank) (Kalajdzievski, "A Rank Stabilization Scaling Factor", 2023).
        quantize_base: must be False; :class:`~torchtune.modules.low_precision.QuantizeBase` quantizes the base.

    Raises:
        ConversionError: arguments contradict each other or are out of range.

    Example:
        >>> from torchtune.modules.peft import LoRA
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [LoRA(rank=2, attn_modules=["q_proj", "v_proj"])])
        >>> print(report)
        LoRA: 4 modules converted (q_proj, v_proj), 448 parameters added...
    """

    phase: ClassVar[Phase] = Phase.ADAPTER

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16,
        dropout: float = 0.0,
        attn_modules: Sequence[LORA_ATTN_MODULES] | None = None,
        apply_to_mlp: bool = False,
        apply_to_output: bool = False,
        target_modules: Sequence[str] | None = None,
        use_dora: bool = False,
        quantize_base: bool = False,
        init: AdapterStart | None = None,
        use_rslora: bool = False,
    ) -> None:
        if quantize_base:
            raise ConversionError(
                "LoRA: quantize_base is an argument of the lora_* builders; beside this conversion, list "
                "torchtune.modules.low_precision.QuantizeBase in model_converters."
            )
        check_adapter_numbers(rank, alpha, dropout)
        if target_modules is not None and (attn_modules is not None or apply_to_mlp or apply_to_output):
            raise ConversionError(
                "LoRA: target_modules replaces attn_modules, apply_to_mlp and apply_to_output: give either the "
                "patterns or the other three."
            )
        for name, modules in (("target_modules", target_modules), ("attn_modules", attn_modules)):
            if isinstance(modules, str):
                raise ConversionError(
                    f"LoRA: {name} is the text '{modules}': give a list of names or, in target_modules, patterns, for "
                    "example ['attn.*', 'mlp.*'] for all layers."
                )
        known = get_args(LORA_ATTN_MODULES)
        unknown = [name for name in attn_modules or () if name not in known]
        if unknown:
            raise ConversionError(f"LoRA: attn_modules has {', '.join(unknown)}, choose out of {', '.join(known)}.")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.attn_modules = list(known if attn_modules is None else attn_modules)
        self.use_dora = use_dora
        self.use_rslora = use_rslora
        if init is not None and init not in get_args(AdapterStart):
            raise ConversionError(f"LoRA: init is '{init}', choose out of {', '.join(get_args(AdapterStart))}.")
        self.init = init
        self.apply_to_mlp = apply_to_mlp
        self.apply_to_output = apply_to_output
        self.target_modules = None if target_modules is None else list(target_modules)
        if not self._targets():
            raise ConversionError("LoRA: no module is chosen, name at least one in attn_modules or target_modules.")

    def _targets(self) -> dict[str, tuple[str, ...]]:
        """Name of a target in error messages -> its patterns, of which at least one must match."""
        if self.target_modules is not None:
            return {pattern: (pattern, f"*.{pattern}") for pattern in self.target_modules}
        targets = {}
        for asked in self.attn_modules:
            names = [f"attn.{name}" for name in ATTENTION_TARGETS.get(asked, (asked,))]
            if asked != "output_proj":
                names += [f"{place}.{name}" for place in ("attn", "mixer") for name in MIXER_INPUTS]
            targets[asked] = tuple(f"{start}{name}" for name in names for start in ("", "*."))
        if self.apply_to_mlp:
            names = (*MLP_MODULES, "experts", *(f"shared_expert.{name}" for name in MLP_MODULES))
            targets["mlp.w1/w2/w3"] = tuple(f"{start}mlp.{name}" for name in names for start in ("", "*."))
        if self.apply_to_output:
            targets["output"] = ("output", "*.output")
        return targets

    def select(self, model: nn.Module) -> dict[str, nn.Linear | GroupedExperts]:
        """Return the modules that :meth:`convert` adapts, by path.

        Raises:
            ConversionError: a target matches no linear layer, or cannot be adapted.
        """
        kinds = (nn.Linear, GroupedExperts)
        linears = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
        names = {path: {path, path.removesuffix(".linear")} for path in linears}  # of a ClippedLinear
        chosen: dict[str, nn.Linear | GroupedExperts] = {}
        for asked, patterns in self._targets().items():
            matching = [
                path
                for path in linears
                if any(fnmatchcase(name, pattern) for name, pattern in product(names[path], patterns))
            ]
            if not matching:
                self._raise_unmatched(model, asked, list(linears))
            chosen |= {path: linears[path] for path in matching}
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for path, layer in chosen.items():
            if isinstance(layer, GroupedExperts):
                self._check_experts(path)
            elif self.init is not None and not layer.weight.is_meta:
                raise ConversionError(
                    f"LoRA: init '{self.init}' takes adapters out of weights while they are read, but '{path}' has its "
                    "weight already: apply the conversion while the model is on the meta device."
                )
            elif id(layer.weight) in embeddings:
                raise ConversionError(_TIED.format(path))
            elif type(layer).forward not in (nn.Linear.forward, StoredLinear.forward):
                raise ConversionError(
                    f"LoRA: '{path}' is a {type(layer).__name__}, which computes more than a linear layer and cannot "
                    "have an adapter: leave it out (apply_to_output or apply_lora_to_output: False)."
                )
        return {path: module for path, module in linears.items() if path in chosen}

    def _check_experts(self, path: str) -> None:
        if self.init is not None:
            raise ConversionError(
                f"LoRA: init '{self.init}' is for linear layers, and '{path}' has experts: leave them out "
                "(apply_to_mlp: False), or leave out init."
            )
        if self.use_dora:
            raise ConversionError(
                f"LoRA: the experts of '{path}' have no adapter with magnitudes: leave them out (apply_to_mlp or "
                "apply_lora_to_mlp: False), or set use_dora to False."
            )

    @staticmethod
    def _raise_unmatched(model: nn.Module, asked: str, paths: list[str]) -> None:
        output = getattr(model, "output", None)
        if asked == "output" and output is not None and not isinstance(output, nn.Module):
            raise ConversionError(_TIED.format("output"))
        raise ConversionError(
            f"LoRA: no linear layer of the model matches '{asked}', the nearest names are "
            f"{', '.join(nearest_module_names(asked, paths)) or 'none: it has no linear layer'}."
        )

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the target modules by :class:`LoRALinear` or :class:`DoRALinear` and freeze all other parameters.

        If checkpoints and peft fuse several layers into one projection (Phi-3's q, k and v), the layers that are no
        targets also get adapters, which stay zero and are not trained.

        Raises:
            ConversionError: a target matches no linear layer, or cannot be adapted; the model is then unchanged.
            ModelError: an adapter could not be saved; the model is then unchanged.
        """
        chosen, without, beside = self.select(model), [], []
        if (spec := getattr(model, "spec", None)) is not None:
            if self.target_modules is None:  # else the user named them explicitly
                without = spec.refused_by_peft(chosen, model.description)
                chosen = {path: module for path, module in chosen.items() if path not in without}
            spec.check_adapters(chosen, model.description)
            if self.use_dora and (plain := spec.parameters_in_peft(chosen, model.description)):
                raise ConversionError(
                    f"LoRA: peft reads no adapter with magnitudes of '{plain[0]}', whose name it takes for that of "
                    "experts: leave it out (apply_to_mlp or apply_lora_to_mlp: False), or set use_dora to False."
                )
            beside = spec.fused_with(chosen, model.description)
            chosen |= {path: model.get_submodule(path) for path in beside}
        linear_kind = DoRALinear if self.use_dora else LoRALinear
        for path, layer in chosen.items():
            make = LoRAGroupedExperts.from_experts if isinstance(layer, GroupedExperts) else linear_kind.from_linear
            new = make(layer, rank=self.rank, alpha=self.alpha, dropout=self.dropout)
            if self.init is not None:
                new.start = self.init
            new.scaling = lora_scaling(self.rank, self.alpha, use_rslora=self.use_rslora)
            model.set_submodule(path, new)
        adapter = get_adapter_params(model)
        frozen = {name for name in adapter if name.startswith(tuple(f"{path}." for path in beside))}
        set_trainable_params(model, adapter.keys() - frozen)
        note = f"rank {self.rank}, alpha {self.alpha:g}; everything else is frozen"
        if self.dropout and self._saved_dropout(model) != self.dropout:
            note += "; files say lora_dropout 0, because peft has none for experts and MLPs beside them"
        if without:
            note += f"; none for {without[0]} and its like ({len(without)}), which peft refuses"
        if beside:
            note += f"; that of {beside[0]} and its like ({len(beside)}) stays zero: files hold it in one with others"
        return ConversionReport(
            name="DoRA" if self.use_dora else "LoRA",
            replaced=[path for path in chosen if path not in beside],
            num_parameters=sum(param.numel() for name, param in adapter.items() if name not in frozen),
            note=note,
        )

    def revert(self, model: nn.Module) -> None:
        """Replace adapted layers by plain layers with the same weights; all parameters stay frozen.

        Raises:
            ConversionError: the adapters are not on the meta device, so their values would be lost.
        """
        if any(not parameter.is_meta for parameter in get_adapter_params(model).values()):
            raise ConversionError(
                "LoRA: the model has adapters with values, so a conversion that comes before them cannot be applied "
                "any more: apply it while the model is on the meta device."
            )
        for path in self.adapted_paths(model):
            model.set_submodule(path, model.get_submodule(path).without_adapter())

    def owned_parameters(self, model: nn.Module) -> set[str]:
        """Return the names of the adapters' parameters."""
        return set(get_adapter_params(model))

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Shard an adapter like its base weight."""
        if not isinstance(module, LoRALinear):
            return style
        from torchtune.modules.peft._adapter_styles import adapted_style

        return adapted_style(style)

    def adapted_paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the layers with an adapter."""
        return [path for path, module in model.named_modules() if isinstance(module, LoRALinear | LoRAGroupedExperts)]

    def _saved_dropout(self, model: nn.Module) -> float:
        """``lora_dropout`` in ``adapter_config.json``: 0 with adapters of parameters, which ``peft`` requires."""
        adapted, spec = self.adapted_paths(model), getattr(model, "spec", None)
        as_parameters = any(isinstance(model.get_submodule(path), LoRAGroupedExperts) for path in adapted)
        if spec is not None and spec.parameters_in_peft(adapted, model.description):
            as_parameters = True
        return 0.0 if as_parameters else self.dropout

    def merged(self, name: str, weight: Tensor, model: nn.Module) -> Tensor:
        """Merge the adapter into the weight ``name``; other tensors are returned unchanged.

        Args:
            name: state-dict key of ``weight`` in ``model``.
            weight: base weight on any device; its floating-point dtype is kept, the sum is in at least float32.
            model: the converted model.
        """
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, LoRAGroupedExperts):
            return module.merged_weight(leaf, weight)
        if leaf != "weight":
            return weight
        return module.merged_weight(weight) if isinstance(module, LoRALinear) else weight

    def peft_config(self, model: nn.Module) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``, with ``target_modules`` in this library's module names.

        A name without dots stands for every layer with that last component; if only some of these have an adapter,
        their paths are listed.
        """
        adapted = self.adapted_paths(model)
        plain = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in adapted)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "lora_dropout": self._saved_dropout(model),
            "use_dora": self.use_dora,
            "bias": "none",
            "target_modules": adapted if plain & set(leaves) else list(leaves),
        }
