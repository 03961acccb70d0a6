# ruff: noqa: E501 (messages stand in one piece, as they are printed)
"""The text of every kind of mistake in a typed config."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from tests.torchtune.config.assets import typed_recipe, untyped_recipe
from torchtune import config
from torchtune._recipe_registry import RecipeTarget
from torchtune.config import Component, ConfigError, Range, RuntimeArgs, did_you_mean
from torchtune.utils import ForeignPathError

Check = Callable[..., typed_recipe.Settings]
PARTS = "tests.torchtune.config.assets.parts"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bach_size=3", "bach_size: there is no such setting; did you mean 'batch_size'?"),
        ("lr=1", "lr: there is no such setting; did you mean 'optimizer.lr'?"),
        ("num_warmup_step=1", "num_warmup_step: there is no such setting; did you mean 'lr_scheduler.num_warmup_steps'?"),
        ("xyzzy=1", "xyzzy: there is no such setting"),
        ("batch_size=two", "batch_size: must be int >= 1, not 'two' (str)"),
        ("batch_size='4'", "batch_size: must be int >= 1, not '4' (str)"),
        ("batch_size=0", "batch_size: must be >= 1, not 0"),
        ("batch_size=1.5", "batch_size: must be int >= 1, not 1.5 (float)"),
        ("batch_size=true", "batch_size: must be int >= 1, not True (bool)"),
        ("clip_grad_norm=0", "clip_grad_norm: must be > 0, not 0.0"),
        ("clip_grad_norm=.nan", "clip_grad_norm: must be > 0, not nan"),
        ("dtype=bf17", "dtype: must be one of bf16, fp32, not 'bf17' (str); did you mean 'bf16'?"),
        ("buckets=[1, b]", "buckets.1: must be int, not 'b' (str)"),
        ("prompt={user: [1]}", "prompt.user: must be str or null, not a list"),
        ("output_dir=null", "output_dir: must be str, not null"),
        ("output_dir=''", "output_dir: is empty: name a folder"),
        ("model=null", "model: must be component, not null"),
        ("model={width: 3}", "model: needs a _component_ key that names the class or function"),
        ("model_converters=[{_componet_: a.b}]", "model_converters.0: needs a _component_ key that names the class or function; rename '_componet_'"),
        ("optimizer.lr=-1e-3", "optimizer.lr: must be >= 0, not -0.001"),
        ("optimizer.betas=[1, 2, 3]", "optimizer.betas: must have 2 items, not 3"),
        ("optimizer.params=[1]", f"optimizer.params: is handed to {PARTS}.Optimizer by the recipe: remove it"),
        ("dataset.0={_component_: torch.nn.Linear, in_features: 3, out_features: 4}", "dataset.0.in_features: is where torch.nn.Linear gets the tokenizer of the recipe: let it take that first, or remove this"),
        ("optimizer.lrr=1", f"optimizer.lrr: {PARTS}.Optimizer takes no argument 'lrr'; did you mean 'lr'?"),
        ("optimizer.epochs=1", f"optimizer.epochs: {PARTS}.Optimizer takes no argument 'epochs'; did you mean 'epochs'?"),
        ("dataset.0.streming=1", f"dataset.0.streming: {PARTS}.chat_dataset takes no argument 'streming'; did you mean 'streaming'?"),
        ("dataset.0.streaming=1", "dataset.0.streaming: must be bool, not 1 (int)"),
        ("tokenizer.prompt_template.usr=x", f"tokenizer.prompt_template.usr: {PARTS}.Template takes no argument 'usr'; did you mean 'user'?"),
        ("model.activation=gleu", "model.activation: must be one of gelu, silu, not 'gleu' (str); did you mean 'gelu'?"),
        ("sampler.temprature=1", "sampler.temprature: there is no such setting; did you mean 'temperature'?"),
        ("metric_logger.projct=a", f"metric_logger.projct: {PARTS}.Logger takes no argument 'projct'; did you mean 'project'?"),
        ("model=tests.torchtune.config.assets.parts.Modl", f"model._component_: '{PARTS}.Modl': module '{PARTS}' has no attribute 'Modl'; did you mean 'Model'?"),
        ("model=torch.optim.Adamw", "model._component_: 'torch.optim.Adamw': module 'torch.optim' has no attribute 'Adamw'; did you mean 'AdamW'?"),
        ("tokenizer.fused=True", f"tokenizer.fused: {PARTS}.Tokenizer takes no argument 'fused'"),
        ("model=torhc.nn.Linear", "model._component_: 'torhc.nn.Linear': there is no module 'torhc' here; did you mean 'torch'?"),
        ("model=torchtune.cofnig.x.Y", "model._component_: 'torchtune.cofnig.x.Y': there is no module 'torchtune.cofnig'; did you mean 'config'?"),
        ("model=no_such_package.x", "model._component_: 'no_such_package.x': there is no module 'no_such_package' here: install it, or correct the name"),
        ("model=Modle", "model._component_: there is no 'Modle' in the recipe's file, nor a module of that name"),
        ("model=a..b", "model._component_: 'a..b' is not a dotted path: a part between the dots is empty"),
        ("model._component_=3", "model._component_: _component_ must be the dotted path of a class or function, not 3"),
        ("model=torchtune.config", "model._component_: 'torchtune.config' is a module, not a class or function"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_its_place_and_remedy(mistakes, override, message):
    texts = [line.removeprefix("command line: ") for line in mistakes(override)]
    expected_elsewhere = ("model=", "c.yaml")  # another component leaves the arguments of the first one behind
    assert [line for line in texts if not line.startswith(expected_elsewhere)] == [message]


def test_a_number_for_a_text_keeps_its_digits_where_another_setting_names_it(check):
    settings = check("output_dir=007", replace={"path: ${output_dir}/tokenizer.json": "path: ${output_dir}"})
    assert settings.output_dir == "007"
    assert settings.tokenizer["path"] == "007"


def test_folders_may_begin_with_the_home_folder(check, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of_nobody")
    settings = check("output_dir=~/runs", replace={"log_dir: ${output_dir}/logs": "log_dir: ~/logs"})
    assert settings.output_dir == "/home/of_nobody/runs"
    assert settings.tokenizer["path"] == "/home/of_nobody/runs/tokenizer.json"
    assert settings.metric_logger["log_dir"] == "/home/of_nobody/logs"


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(mistakes):
    replace = {
        "  layers: 4": "  layer: 4",
        "lr: 2e-5": "lr: fast",
        "seed: 7": "sed: 7",
        "  path: ${output_dir}/tok": "  pth: tok",
    }
    assert mistakes("epochs=0", replace=replace) == [
        f"c.yaml:9: model.layer: {PARTS}.Model takes no argument 'layer'; did you mean 'layers'?",
        f"c.yaml:14: tokenizer.pth: {PARTS}.Tokenizer takes no argument 'pth'; did you mean 'path'?",
        "c.yaml:31: optimizer.lr: must be float >= 0, not 'fast' (str)",
        "c.yaml:51: sed: there is no such setting; did you mean 'seed'?",
        "command line: epochs: must be >= 1, not 0",
    ]


def test_missing_keys_are_named_with_their_type(mistakes):
    assert mistakes("~output_dir", replace={"${output_dir}/tok": "tok", "${output_dir}/logs": "logs"}) == [
        "c.yaml:1: output_dir: is required (str) but not given"
    ]
    assert mistakes("~model.width") == [
        f"c.yaml:6: model.width: {PARTS}.Model needs this argument, but it is not given"
    ]
    assert mistakes("~lr_scheduler.num_warmup_steps")[0].endswith(
        "warmup_schedule needs this argument, but it is not given"
    )


def test_component_that_does_not_take_runtime_arguments_is_a_mistake(mistakes):
    texts = mistakes("lr_scheduler={_component_: tests.torchtune.config.assets.parts.Template}")
    assert (
        f"command line: lr_scheduler: {PARTS}.Template takes no argument 'last_epoch', which the recipe hands over"
        in texts
    )
    texts = mistakes("dataset={_component_: builtins.object}", "dataset_val=null")
    assert texts == [
        "command line: dataset: builtins.object takes no argument for the tokenizer that the recipe hands over"
    ]


def test_kwargs_take_no_positional_runtime_argument(mistakes, tmp_path):
    (tmp_path / "own_scheduler.py").write_text(
        "def constant(*, num_training_steps, last_epoch, **kwargs):\n    return dict(kwargs)\n"
    )
    assert mistakes("lr_scheduler={_component_: own_scheduler.constant}") == [
        "command line: lr_scheduler: own_scheduler.constant takes no argument for the optimizer that the recipe hands "
        "over"
    ]


def test_rules_across_settings_are_checked(check, mistakes):
    assert mistakes("optimizer_in_bwd=true") == ["c.yaml:53: clip_grad_norm: cannot be used with optimizer_in_bwd"]
    assert check("optimizer_in_bwd=true", "clip_grad_norm=null").optimizer_in_bwd
    assert mistakes("sampler.top_p=2") == ["c.yaml:40: sampler: top_p is a probability: at most 1"]
    assert mistakes("sampler.strategy=greedy", "sampler.top_p=0.5") == [
        "command line: sampler.top_p: has no meaning with strategy=greedy"
    ]


def test_values_arrive_in_their_types(check):
    settings = check("clip_grad_norm=2", "output_dir=123", "debug_mode=1", "prompt.user=a=b: c", "dataset_val=null")
    assert settings.clip_grad_norm == 2.0
    assert isinstance(settings.clip_grad_norm, float)
    assert settings.output_dir == "123"
    assert settings.debug_mode == 1
    assert settings.prompt == {"user": "a=b: c"}
    assert settings.dataset_val is None
    assert settings.tokenizer.path == "123/tokenizer.json"
    assert settings.optimizer.lr == 2e-5
    assert settings.dataset[1]._component_ == f"{PARTS}.alpaca_like"
    assert settings.epochs == 3
    assert settings.recipe == "typed_recipe"


@dataclass
class Stage:
    steps: int
    loss: Component


@dataclass
class Stages:
    stages: tuple[Stage, ...]
    pair: tuple[Component, int]
    empty: tuple[Stage, ...]
    losses: Sequence[Component]
    stage_of: Mapping[str, Stage]


def test_components_and_dataclasses_are_built_at_any_depth(tmp_path):
    stage = {"steps": 2, "loss": {"_component_": "torch.nn.MSELoss"}}
    data = {
        "stages": [stage, stage],
        "pair": [stage["loss"], 3],
        "empty": [],
        "losses": [stage["loss"]],
        "stage_of": {"a": stage},
    }
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(data))
    settings = config.load_and_check(path, recipe=Stages)
    assert [type(item) for item in settings.stages] == [Stage, Stage]
    assert settings.stages[1].steps == 2
    assert settings.stages[1].loss._component_ == "torch.nn.MSELoss"
    assert settings.pair[0]._component_ == "torch.nn.MSELoss"
    assert settings.pair[1] == 3
    assert settings.empty == ()
    assert settings.losses[0]._component_ == "torch.nn.MSELoss"
    assert settings.stage_of["a"].steps == 2


def test_defaults_are_seen_by_references(check):
    assert check("~batch_size").batch_size_val == 2


def test_a_retired_key_warns_once(check, caplog):
    for _ in range(2):
        check("low_cpu_ram=true")
    assert [record.getMessage() for record in caplog.records] == [
        "command line: 'low_cpu_ram' has no effect any more: weights are always streamed."
    ]


def test_a_module_that_fails_to_import_says_why(mistakes, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import package_that_is_not_there\n")
    (tmp_path / "is_broken.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    assert (
        "'needs_more.f': module 'needs_more' failed to import because 'package_that_is_not_there' is not installed"
        in mistakes("model=needs_more.f")[0]
    )
    assert "module 'is_broken' failed to import with SyntaxError: " in mistakes("model=is_broken.f")[0]
    assert "module 'raises' failed to import with ZeroDivisionError: division by zero" in mistakes("model=raises.f")[0]


def test_component_is_accepted_as_an_argument_of_any_type_but_a_plain_one(check, mistakes):
    template = "{_component_: tests.torchtune.config.assets.parts.Template}"
    check(f"dataset.0.column_map={template}", f"metric_logger.group={template}")
    assert mistakes(f"model.width={template}") == ["command line: model.width: must be int, not a mapping"]


def test_bounds_of_the_recipe_hold_where_a_signature_has_no_type(mistakes, tmp_path):
    (tmp_path / "own_optimizer.py").write_text("def sgd(params, lr): ...\n")
    setting = "optimizer={_component_: own_optimizer.sgd, lr: %s}"
    assert mistakes(setting % "fast") == ["command line: optimizer.lr: must be float >= 0, not 'fast' (str)"]
    assert mistakes(setting % "-1") == ["command line: optimizer.lr: must be >= 0, not -1.0"]


def test_components_and_keys_of_an_untyped_recipe_are_checked(tmp_path):
    file = Path(__file__).parent / "assets/untyped.yaml"
    cfg = config.load_and_check(file, ["inference.max_steps=5"], untyped_recipe.recipe_main)
    assert cfg.output_dir == "/tmp/run/out"
    assert cfg.inference.max_steps == 5
    with pytest.raises(ConfigError) as caught:
        config.load_and_check(file, ["epcohs=3", "~epochs", "model.wdith=4"], untyped_recipe.recipe_main)
    assert [str(mistake) for mistake in caught.value.errors] == [
        "command line: epcohs: is never read by untyped_recipe.py; did you mean 'epochs'?",
        f"command line: model.wdith: {PARTS}.Model takes no argument 'wdith'; did you mean 'width'?",
    ]


def _main_of(folder: Path, text: str) -> Callable[..., object]:
    path = folder / "mine.py"
    path.write_text(text)
    return RecipeTarget("mine", path).load_main()


@pytest.mark.parametrize(
    ("line", "warns"),
    [
        ("loss = cfg.batch_size; print({'loss': loss})", True),
        ("loss = config.instantiate(cfg.loss)", False),
        ("loss = getattr(cfg, 'loss')", False),
        ("print('loss', vars(cfg))", False),  # reads any key
        ("from collections import Counter; loss = Counter; loss.loss = cfg.epochs", True),
    ],
)
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_key_that_the_recipe_does_not_read_is_a_warning(is_typed, line, warns, tmp_path, caplog):
    """A copied recipe with a loss of its own says that the one of the config is not used."""
    assets = Path(__file__).parent / "assets"
    if is_typed:
        source = Path(typed_recipe.__file__)
        content = (assets / "typed.yaml").read_text()
        line_of_loss = "loss:"
    else:
        source = Path(untyped_recipe.__file__)
        content = (assets / "untyped.yaml").read_text() + "loss: 3\n"
        line_of_loss = "loss: 3"
    text = source.read_text().replace("vars(cfg)['batch_size']", "cfg.batch_size")
    text = text.replace("    print(f", f"    {line}\n    print(f")
    config_path = tmp_path / "mine.yaml"
    config_path.write_text(content)
    config.load_and_check(config_path, [], _main_of(tmp_path, text))
    number = content.splitlines().index(line_of_loss) + 1
    warnings = [record.getMessage() for record in caplog.records if "never reads" in record.getMessage()]
    assert (f"loss ({config_path}:{number})" in "".join(warnings)) is warns
    assert len(warnings) <= 1


def test_a_recipe_that_shifts_labels_again_is_refused(tmp_path):
    line = "labels = torch.hstack((labels[..., 1:], self.ignore_labels_cache[: labels.shape[0]]))"
    text = (
        Path(untyped_recipe.__file__)
        .read_text()
        .replace("        self._cfg = cfg", f"        self._cfg, self.data = cfg, cfg.dataset\n        # {line}")
    )
    config_path = tmp_path / "mine.yaml"
    dataset = "dataset:\n  _component_: torchtune.datasets.alpaca_dataset\n"
    config_path.write_text((Path(untyped_recipe.__file__).parent / "untyped.yaml").read_text() + dataset)
    config.load_and_check(config_path, [], _main_of(tmp_path, text))
    shifted = text.replace(f"# {line}", line)
    number = shifted.splitlines().index(f"        {line}") + 1
    with pytest.raises(ConfigError, match=f"line {number} of mine.py shifts them again: remove it"):
        config.load_and_check(config_path, [], _main_of(tmp_path, shifted))
    config.load_and_check(config_path, [f"dataset._component_={PARTS}.Model"], _main_of(tmp_path, shifted))


def test_only_paths_are_refused_for_their_owner(mistakes, monkeypatch):
    def refuse(path):
        if path.startswith("theirs"):
            raise ForeignPathError(f"{path} belongs to another user")

    monkeypatch.setattr("torchtune.config._parse.refuse_path_of_other_user", refuse)
    first, second = mistakes("prompt={text: theirs/a, my_file: theirs/b, work_dir: theirs/c, name_of_path: theirs}")
    assert "theirs/b belongs to another user" in first
    assert "theirs/c belongs to another user" in second


def test_a_config_in_memory_is_validated():
    config.validate({"a": {"_component_": f"{PARTS}.Optimizer", "lr": 0.1}, "b": 3})
    with pytest.raises(ConfigError, match=r"a\.b\.0\.usr: .*Template takes no argument 'usr'; did you mean 'user'"):
        config.validate({"a": {"b": [{"_component_": f"{PARTS}.Template", "usr": 1}]}})


def test_a_config_is_found_by_path_or_name():
    with pytest.raises(ConfigError, match=r"no_such: is neither a file nor a shipped config: see 'tune ls'"):
        config.load_and_check("no_such", [], typed_recipe.recipe_main)
    with pytest.raises(ConfigError, match=r"no_such\.yaml: there is no such file"):
        config.load_and_check("no_such.yaml", [], typed_recipe.recipe_main)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lrr", "; did you mean 'lr'?"),
        ("pakced", "; did you mean 'packed'?"),
        ("batchsize", "; did you mean 'batch_size'?"),
        ("zzz", ""),
        ("AdamZ", "; did you mean 'Adam'?"),  # the class, not the module of the same name
    ],
)
def test_the_nearest_name_is_suggested(name, found):
    names = ["lr", "packed", "batch_size", "epochs", "weight_decay", "Adam", "adam"]
    assert did_you_mean(name, names) == found


def test_markers_can_be_members_of_unions():
    assert Annotated[Component, RuntimeArgs("x", rules={"lr": Range(min=0)})] | None


def test_ranges_hold_numbers_within_their_bounds():
    assert str(Range(min=0, below=1)) == ">= 0 and < 1"
    assert Range(above=0, max=1).holds(1)
    assert not Range(above=0, max=1).holds(0)


@dataclass
class Sizes:
    batch_size: int = 4

    def check(self):
        if self.batch_size < 2:
            yield "batch_size", "is below 2"


def test_values_are_tested_together_only_if_all_references_resolve(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: ${.missing}\n")
    with pytest.raises(ConfigError, match=r"refers to '\.missing', which does not exist"):
        config.load_and_check(path, recipe=Sizes)
