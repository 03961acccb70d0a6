"""Conversion that adds LoRA adapters."""

import re
from collections.abc import Collection, Mapping, Sequence
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
from torchtune.modules.low_precision.layers import StoredLinear
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.output_projection import TiedLinear
from torchtune.modules.peft.adapters import (
    ATTENTION_TARGETS,
    LORA_ATTN_MODULES,
    MIXER_INPUTS,
    MLP_MODULES,
    get_adapter_params,
    set_trainable_params,
)
from torchtune.modules.peft.lora import (
    AdapterStart,
    DoRALinear,
    LoRAGroupedExperts,
    LoRALinear,
    check_adapter_numbers,
    lora_scaling,
)

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle

_TIED_OUTPUT = (
    "LoRA: the projection '{}' is tied to the token embedding of this model and cannot have an adapter of its own, "
    "leave it out (apply_to_output or apply_lora_to_output: False)."
)


def _path_patterns(paths: Sequence[str]) -> tuple[str, ...]:
    """Return :mod:`fnmatch` patterns of whole module paths and of their ends."""
    patterns = []
    for path in paths:
        patterns += [path, f"*.{path}"]
    return tuple(patterns)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a module path matches any :mod:`fnmatch` pattern."""
    names = {path, path.removesuffix(".linear")}  # a ClippedLinear holds its layer as `linear`
    return any(fnmatchcase(name, pattern) for name, pattern in product(names, patterns))


def _matches_expression(path: str, expression: str) -> bool:
    """Return whether a regular expression matches a module path or its end, as in ``peft``."""
    return re.match(rf"(.*\.)?({expression})$", path) is not None


def _paths_with_parameters(model: nn.Module) -> list[str]:
    """Return the paths of the modules inside ``model`` that have parameters, or contain such modules."""
    paths = []
    for path, module in model.named_modules():
        has_parameters = next(module.parameters(), None) is not None
        if path and has_parameters:  # the path of the model itself is empty
            paths.append(path)
    return paths


def _is_classifier(model: nn.Module) -> bool:
    description = getattr(model, "description", None)  # a model of the user's own has none
    return description is not None and description.is_classifier


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
        train_modules: patterns, like those of ``target_modules``, of modules that are trained whole beside the
            adapters: ``tok_embeddings``, ``output``, ``norm``, ``layers.0.mlp``; ``score`` is the output layer of a
            classifier. Adapter files hold their weights (PEFT's ``modules_to_save``). An embedding that is tied to the
            output is trained as one with it.
        rank_pattern: regular expression of module paths, or of their ends -> rank of the adapters of these modules
            (PEFT's ``rank_pattern``), for example ``{"q_proj": 4, "layers.[01].mlp.*": 16}``. The first one that
            matches counts.
        alpha_pattern: the same for alpha.
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
        train_modules: Sequence[str] | None = None,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
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
        module_lists = {"target_modules": target_modules, "attn_modules": attn_modules, "train_modules": train_modules}
        for name, modules in module_lists.items():
            if isinstance(modules, str):
                raise ConversionError(
                    f"LoRA: {name} is the text '{modules}': give a list of names or, in target_modules, patterns, for "
                    "example ['attn.*', 'mlp.*'] for all layers."
                )
        choices = get_args(LORA_ATTN_MODULES)
        unknown = [name for name in attn_modules or () if name not in choices]
        if unknown:
            raise ConversionError(f"LoRA: attn_modules has {', '.join(unknown)}, choose out of {', '.join(choices)}.")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.attn_modules = list(choices if attn_modules is None else attn_modules)
        self.use_dora = use_dora
        self.use_rslora = use_rslora
        if init is not None and init not in get_args(AdapterStart):
            raise ConversionError(f"LoRA: init is '{init}', choose out of {', '.join(get_args(AdapterStart))}.")
        self.init = init
        self.apply_to_mlp = apply_to_mlp
        self.apply_to_output = apply_to_output
        self.target_modules = None if target_modules is None else list(target_modules)
        self.train_modules = list(train_modules or ())
        self.rank_pattern = dict(rank_pattern or {})
        self.alpha_pattern = dict(alpha_pattern or {})
        self._check_number_patterns()
        if not self._targets():  # an empty list, and neither MLPs nor the output
            raise ConversionError("LoRA: no module is chosen, name at least one in attn_modules or target_modules.")

    @property
    def is_uniform(self) -> bool:
        """Whether all adapters have the same rank and alpha, and nothing is trained beside them."""
        return not (self.train_modules or self.rank_pattern or self.alpha_pattern)

    def _check_number_patterns(self) -> None:
        """Raise ``ConversionError`` unless the keys are regular expressions and the values ranks and alphas."""
        settings = (
            ("rank_pattern", self.rank_pattern, int, "a whole number from 1"),
            ("alpha_pattern", self.alpha_pattern, int | float, "a number"),
        )
        for name, numbers, number_type, kind in settings:
            for pattern, number in numbers.items():
                if not isinstance(number, number_type) or isinstance(number, bool):  # True is an int in Python
                    raise ConversionError(f"LoRA: {name} has {number!r} for '{pattern}': give {kind}.")
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ConversionError(
                        f"LoRA: {name} has '{pattern}', which is no regular expression ({error}): write it like "
                        "'q_proj' or 'layers.[01].attn.*'."
                    ) from error
        for rank in self.rank_pattern.values():
            check_adapter_numbers(rank, self.alpha, self.dropout)
        for alpha in self.alpha_pattern.values():
            check_adapter_numbers(self.rank, alpha, self.dropout)

    def _targets(self) -> dict[str, tuple[str, ...]]:
        """Name of a target in error messages -> its patterns, of which at least one must match."""
        if self.target_modules is not None:
            return {pattern: _path_patterns([pattern]) for pattern in self.target_modules}
        targets = {}
        for target in self.attn_modules:
            # The name itself, and the projections of latent attention that take its place.
            paths = [f"attn.{name}" for name in ATTENTION_TARGETS.get(target, (target,))]
            if target != "output_proj":
                # A mixer that replaces attention has its place, `attn`; one that accompanies it is `mixer`.
                paths += [f"attn.{name}" for name in MIXER_INPUTS]
                paths += [f"mixer.{name}" for name in MIXER_INPUTS]
            targets[target] = _path_patterns(paths)
        if self.apply_to_mlp:
            paths = [f"mlp.{name}" for name in MLP_MODULES]
            paths.append("mlp.experts")
            paths += [f"mlp.shared_expert.{name}" for name in MLP_MODULES]
            targets["mlp.w1/w2/w3"] = _path_patterns(paths)
        if self.apply_to_output:
            targets["output"] = _path_patterns(["output"])
        return targets

    def select(self, model: nn.Module) -> dict[str, nn.Linear | GroupedExperts]:
        """Return the modules that :meth:`convert` adapts, by path.

        Raises:
            ConversionError: a target matches no linear layer, or cannot be adapted.
        """
        kinds = (nn.Linear, GroupedExperts)
        linears = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
        chosen: dict[str, nn.Linear | GroupedExperts] = {}
        for target, patterns in self._targets().items():
            matching = [path for path in linears if _matches(path, patterns)]
            if not matching:
                self._raise_unmatched(model, target, list(linears))
            for path in matching:
                chosen[path] = linears[path]
        # By identity: a tied projection has the embedding's parameter as its weight. An adapter of it would be merged
        # into the embedding, too.
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
                raise ConversionError(_TIED_OUTPUT.format(path))
            elif type(layer).forward not in (nn.Linear.forward, StoredLinear.forward):
                raise ConversionError(
                    f"LoRA: '{path}' is a {type(layer).__name__}, which computes more than a linear layer and cannot "
                    "have an adapter: leave it out (apply_to_output or apply_lora_to_output: False)."
                )
        # In the order of the model, not of the targets.
        return {path: module for path, module in linears.items() if path in chosen}

    def _check_experts(self, path: str) -> None:
        """Raise ``ConversionError`` if a setting is for linear layers alone, and ``path`` has experts."""
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

    def _trained_modules(self, model: nn.Module) -> dict[str, list[str]]:
        """Pattern in ``train_modules`` -> paths of the modules with parameters that it matches."""
        paths = _paths_with_parameters(model)
        is_classifier = _is_classifier(model)
        matching = {}
        for pattern in self.train_modules:
            patterns = _path_patterns([pattern])
            if pattern == "score" and is_classifier:  # what transformers and peft call its output layer
                patterns = _path_patterns(["output"])
            matching[pattern] = [path for path in paths if _matches(path, patterns)]
        return matching

    def _check_trained_modules(self, model: nn.Module, adapted: Collection[str]) -> None:
        """Raise ``ConversionError`` if a module of ``train_modules`` is missing or cannot be trained whole."""
        matching = self._trained_modules(model)
        trained = set().union(*matching.values())
        output = getattr(model, "output", None)
        for pattern, paths in matching.items():
            # A tied output is no module with parameters, so that no path matches; it is trained with the embedding.
            if pattern == "output" and isinstance(output, TiedLinear):
                if not any(path.endswith("tok_embeddings") for path in trained):
                    raise ConversionError(
                        "LoRA: train_modules has 'output', which is tied to the token embedding of this model: name "
                        "tok_embeddings, which trains both as one."
                    )
            elif not paths:
                nearest = ", ".join(nearest_module_names(pattern, _paths_with_parameters(model)))
                raise ConversionError(
                    f"LoRA: no module of the model matches '{pattern}' in train_modules, the nearest names are "
                    f"{nearest}."
                )
        for path in sorted(trained):
            for adapted_path in adapted:
                if adapted_path == path or adapted_path.startswith(f"{path}."):
                    raise ConversionError(
                        f"LoRA: '{adapted_path}' would have an adapter and be trained whole: leave it out of "
                        "train_modules, or out of the modules with an adapter."
                    )
            for part in model.get_submodule(path).modules():
                if isinstance(part, GroupedExperts):
                    raise ConversionError(
                        f"LoRA: train_modules has '{path}' with experts, which peft cannot save whole: leave them out "
                        "and give them adapters (apply_to_mlp: True)."
                    )
                if isinstance(part, StoredLinear):
                    raise ConversionError(
                        f"LoRA: train_modules has '{path}', whose weight is quantized and cannot be trained: leave it "
                        "out of train_modules, or out of the quantized base."
                    )

    def trained_weights(self, model: nn.Module) -> set[str]:
        """Return the names of the weights of ``train_modules``."""
        names = set()
        for paths in self._trained_modules(model).values():
            for path in paths:
                for name, _ in model.get_submodule(path).named_parameters():
                    names.add(f"{path}.{name}")
        return names

    def _first_match(self, patterns: Mapping[str, float], path: str, default: float) -> float:
        """Return the rank or alpha of the first pattern that matches a path or its end."""
        for pattern, number in patterns.items():
            if _matches_expression(path, pattern):
                return number
        return default

    def _ranks_and_alphas(self, model: nn.Module, paths: Collection[str]) -> dict[str, tuple[int, float]]:
        """Return path -> rank and alpha of the adapters.

        Raises:
            ConversionError: a pattern matches no path, or modules that files hold as one get different numbers.
        """
        for name, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            for pattern in patterns:
                if not any(_matches_expression(path, pattern) for path in paths):
                    nearest = ", ".join(nearest_module_names(pattern, list(paths)))
                    raise ConversionError(
                        f"LoRA: no module with an adapter matches '{pattern}' in {name}, the nearest names are "
                        f"{nearest}."
                    )
        numbers = {}
        for path in paths:
            rank = self._first_match(self.rank_pattern, path, self.rank)
            alpha = self._first_match(self.alpha_pattern, path, self.alpha)
            numbers[path] = int(rank), alpha
        spec = getattr(model, "spec", None)
        if spec is None:  # a model of the user's: nothing is known of its files
            return numbers
        # Modules whose adapters peft takes for those of experts, which all have one rank and alpha.
        stacked = set(spec.parameters_in_peft(paths, model.description))
        for path in paths:
            if isinstance(model.get_submodule(path), GroupedExperts):
                stacked.add(path)
        for path in paths:
            if path in stacked and numbers[path] != (self.rank, self.alpha):
                raise ConversionError(
                    f"LoRA: rank_pattern or alpha_pattern matches '{path}', which peft takes for experts, all of one "
                    "rank and alpha: leave it out of the pattern."
                )
            for neighbor in spec.fused_modules(path, model.description):
                if numbers.get(neighbor, numbers[path]) != numbers[path]:
                    raise ConversionError(
                        f"LoRA: '{path}' and '{neighbor}' are one projection in files, and rank_pattern or "
                        "alpha_pattern gives them different numbers: give them the same."
                    )
        return numbers

    @staticmethod
    def _raise_unmatched(model: nn.Module, target: str, paths: list[str]) -> None:
        """Raise ``ConversionError`` for a target that matches none of the linear layers ``paths``."""
        output = getattr(model, "output", None)
        if target == "output" and output is not None and not isinstance(output, nn.Module):
            raise ConversionError(_TIED_OUTPUT.format("output"))
        nearest = ", ".join(nearest_module_names(target, paths)) or "none: it has no linear layer"
        raise ConversionError(
            f"LoRA: no linear layer of the model matches '{target}', the nearest names are {nearest}."
        )

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the target modules by :class:`LoRALinear` or :class:`DoRALinear` and freeze all other parameters.

        If checkpoints and peft fuse several layers into one projection (Phi-3's q, k and v), the layers that are not
        targets also get adapters, which stay zero and are not trained.

        Raises:
            ConversionError: a target matches no linear layer, or cannot be adapted; the model is then unchanged.
            ModelError: an adapter could not be saved; the model is then unchanged.
        """
        chosen, refused, fused = self._choose(model)
        self._check_trained_modules(model, chosen)
        numbers = self._ranks_and_alphas(model, chosen)

        for path, layer in chosen.items():
            if isinstance(layer, GroupedExperts):
                make = LoRAGroupedExperts.from_experts
            elif self.use_dora:
                make = DoRALinear.from_linear
            else:
                make = LoRALinear.from_linear
            rank, alpha = numbers[path]
            adapted = make(layer, rank=rank, alpha=alpha, dropout=self.dropout)
            if self.init is not None:
                adapted.start = self.init  # loading the base weight initializes the adapter from it
            adapted.scaling = lora_scaling(rank, alpha, use_rslora=self.use_rslora)  # `make` knows no rsLoRA
            model.set_submodule(path, adapted)

        adapter = get_adapter_params(model)
        # Adapters of layers that are not targets stay zero.
        fused_prefixes = tuple(f"{path}." for path in fused)
        trained_adapter = {name: param for name, param in adapter.items() if not name.startswith(fused_prefixes)}
        trained = self.trained_weights(model)
        set_trainable_params(model, trained_adapter.keys() | trained)
        return ConversionReport(
            name="DoRA" if self.use_dora else "LoRA",
            replaced=[path for path in chosen if path not in fused],
            num_parameters=sum(param.numel() for param in trained_adapter.values()),
            note=self._note(model, trained, refused, fused),
        )

    def _choose(self, model: nn.Module) -> tuple[dict[str, nn.Module], list[str], list[str]]:
        """Return the modules that get adapters by path, paths that peft refuses, and paths whose adapter stays zero.

        Raises:
            ConversionError, ModelError: see :meth:`convert`.
        """
        chosen = self.select(model)
        spec = getattr(model, "spec", None)
        if spec is None:  # a model of the user's: nothing is known of its files
            return chosen, [], []
        refused: list[str] = []
        if self.target_modules is None:  # else the user named them explicitly, and check_adapters raises
            refused = spec.refused_by_peft(chosen, model.description)
            chosen = {path: module for path, module in chosen.items() if path not in refused}
        spec.check_adapters(chosen, model.description)
        if self.use_dora:
            parameters = spec.parameters_in_peft(chosen, model.description)
            if parameters:
                raise ConversionError(
                    f"LoRA: peft takes '{parameters[0]}' for experts by its name, and cannot read magnitudes of them: "
                    "leave it out (apply_to_mlp or apply_lora_to_mlp: False), or set use_dora to False."
                )
        # Files that fuse q, k and v have one adapter for all three: those that were not chosen get one that stays zero.
        fused = spec.fused_with(chosen, model.description)
        for path in fused:
            chosen[path] = model.get_submodule(path)
        return chosen, refused, fused

    def _note(self, model: nn.Module, trained: set[str], refused: list[str], fused: list[str]) -> str:
        """Return the report's note: rank and alpha, and modules that are trained whole or have no trained adapter."""
        note = f"rank {self.rank}, alpha {self.alpha:g}"
        if self.rank_pattern or self.alpha_pattern:
            note += " unless a pattern gives others"
        if trained:
            count = sum(model.get_parameter(name).numel() for name in trained)
            note += f"; {', '.join(self.train_modules)} trained whole ({count:,} parameters)"
            trains_embedding = any(name.endswith("tok_embeddings.weight") for name in trained)
            if trains_embedding and isinstance(getattr(model, "output", None), TiedLinear):
                note += ", the embedding as one with the output tied to it"
        note += "; everything else is frozen"
        if self.dropout and self._saved_dropout(model) != self.dropout:  # training has dropout all the same
            note += "; files say lora_dropout 0, because peft has none for experts and MLPs beside them"
        if refused:
            note += f"; no adapter for {refused[0]} and its like ({len(refused)}), which peft refuses"
        if fused:
            note += (
                f"; the adapter of {fused[0]} and its like ({len(fused)}) stays zero: files hold it in one with others"
            )
        return note

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
        from torchtune.modules.parallel.tensor_parallel import adapted_style

        return adapted_style(style)

    def adapted_paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the layers with an adapter."""
        return [path for path, module in model.named_modules() if isinstance(module, LoRALinear | LoRAGroupedExperts)]

    def _saved_dropout(self, model: nn.Module) -> float:
        """``lora_dropout`` in ``adapter_config.json``: 0 with adapters of parameters, which ``peft`` requires."""
        adapted = self.adapted_paths(model)
        if any(isinstance(model.get_submodule(path), LoRAGroupedExperts) for path in adapted):
            return 0.0
        spec = getattr(model, "spec", None)
        if spec is not None and spec.parameters_in_peft(adapted, model.description):
            return 0.0
        return self.dropout

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
        if leaf == "weight" and isinstance(module, LoRALinear):
            return module.merged_weight(weight)
        return weight

    def peft_config(self, model: nn.Module) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``, with this library's module names.

        A name without dots stands for every layer with that last component; if only some of these have an adapter,
        their paths are listed. ``rank_pattern`` and ``alpha_pattern`` list the layers with numbers of their own.
        """
        adapted = self.adapted_paths(model)
        # Last components of the paths of adapted layers, each once, and of the other linear layers.
        leaves = list(dict.fromkeys(path.rpartition(".")[2] for path in adapted))
        plain_leaves = set()
        for path, module in model.named_modules():
            # A LoRALinear with a quantized base is an nn.Linear as well.
            if isinstance(module, nn.Linear) and not isinstance(module, LoRALinear):
                plain_leaves.add(path.rpartition(".")[2])
        are_ambiguous = not plain_leaves.isdisjoint(leaves)
        ranks = {}
        alphas = {}
        for path in adapted:
            module = model.get_submodule(path)
            if module.rank != self.rank:
                ranks[path] = module.rank
            if module.alpha != self.alpha:
                alphas[path] = module.alpha
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if _is_classifier(model) else "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "use_rslora": self.use_rslora,
            "lora_dropout": self._saved_dropout(model),
            "use_dora": self.use_dora,
            "bias": "none",
            "target_modules": adapted if are_ambiguous else leaves,
        }
