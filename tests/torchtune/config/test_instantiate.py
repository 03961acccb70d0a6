"""Objects from component nodes."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from tests.torchtune.config.assets import parts
from torchtune.config import (
    Component,
    ConfigError,
    Configurable,
    InstantiationError,
    ObjectPath,
    Range,
    instantiate,
    load_and_check,
    save_config,
    to_dict,
)
from torchtune.estimate import check_settings
from torchtune.evaluation import make_scores
from torchtune.utils import UserError

PARTS = "tests.torchtune.config.assets.parts"


def local_component(value: Any = None, **rest: Any) -> tuple[Any, dict[str, Any]]:
    return value, rest


def above_zero(value: float, text: str = "{}") -> dict[str, Any]:
    if value <= 0:
        raise ValueError(f"value is {value}: it must be above 0.")
    return json.loads(text)


def test_a_value_that_a_component_refuses_is_a_mistake_of_the_config_and_no_other_error_is():
    node = {"_component_": f"{__name__}.above_zero", "value": 0}
    for kind in (UserError, ValueError):
        with pytest.raises(kind, match=r"test_instantiate\.above_zero: value is 0: it must be above 0\.$"):
            instantiate(node)
    with pytest.raises(json.JSONDecodeError):
        instantiate({**node, "value": 1, "text": "{"})


def test_a_value_that_a_base_class_refuses_is_a_mistake_too():
    with pytest.raises(UserError, match="AdamW: Invalid beta parameter at index 0: 2"):
        instantiate({"_component_": "torch.optim.AdamW", "betas": [2, 3]}, [torch.nn.Parameter(torch.ones(1))])


def test_a_path_that_a_component_cannot_open_is_named(tmp_path):
    (tmp_path / "file").touch()
    node = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(tmp_path / "file")}
    with pytest.raises(UserError, match=r"DiskLogger: .*file: File exists: choose another path\.$"):
        instantiate(node)


@dataclass
class Settings:
    loss: Component


def typed_main(cfg: Settings) -> None:
    print(cfg.loss)


def untyped_main(cfg: DictConfig) -> None:
    print(cfg.loss)


def never_wrong(rows: list[Any], texts: list[str]) -> list[float]:
    return [1.0] * len(texts)


@pytest.mark.parametrize("recipe_main", [typed_main, untyped_main])
def test_a_name_of_the_recipe_is_found_from_the_library_and_saved_as_written(recipe_main, tmp_path):
    """A copied recipe has a loss of its own, which not only the recipe builds."""
    nested = {"_component_": "local_component", "text": "cuda:0"}
    written = {"loss": {"_component_": "local_component", "value": nested}}
    (tmp_path / "config.yaml").write_text(json.dumps(written))
    cfg = load_and_check(tmp_path / "config.yaml", [], recipe_main)
    assert instantiate(cfg.loss, caller_globals={}) == ((None, {"text": "cuda:0"}), {})
    save_config(cfg, tmp_path / "saved.yaml")
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text()) == written


def test_a_function_of_the_recipe_is_found_by_a_reward(tmp_path):
    reward = "torchtune.rlhf.reward_functions.FunctionReward"
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"loss": {"_component_": reward, "function": "never_wrong"}}))
    cfg = load_and_check(config, [], typed_main)
    built = instantiate(cfg.loss, caller_globals={})
    assert (built([{}], ["a"]), built.name) == ([1.0], "never_wrong")
    assert to_dict(cfg, redact=True)["loss"]["function"] == "never_wrong"
    with pytest.raises(ConfigError, match=r"there is no 'never_rong' in the recipe's file.*'never_wrong'"):
        load_and_check(config, ["loss.function=never_rong"], typed_main)


@dataclass
class ScoreSettings:
    scores: list[Annotated[str, ObjectPath(required=False)]]


def scored_main(cfg: ScoreSettings) -> None:
    print(cfg.scores)


def test_score_names_a_function_of_the_recipe_and_no_module_that_it_imports(tmp_path):
    """``json`` is also a module here, but the name of a score."""
    names = ["json", "never_wrong", "regex:[0-9]+", f"{PARTS}.count"]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"scores": names}))
    cfg = load_and_check(config, [], scored_main)
    assert cfg.scores == ["json", f"{__name__}:never_wrong", "regex:[0-9]+", f"{PARTS}.count"]
    assert to_dict(cfg, redact=True)["scores"] == names
    score = make_scores(cfg.scores[1:2])[0]
    assert (score([{}], ["a"]), score.name) == ([1.0], "never_wrong")
    settings = {"scores": cfg.scores, "keep_best": "val_never_wrong", "run_val_every_n_steps": 1, "dataset_val": {}}
    assert [key for key, _ in check_settings(settings)] == ["keep_best"], "more is better: max:val_never_wrong"
    other_text = load_and_check(config, ["scores=[never_rong]"], scored_main).scores
    with pytest.raises(UserError, match=r"there is no score 'never_rong': use exact, .*, as in my_module\.never_rong"):
        make_scores(other_text)


def test_null_component_is_none():
    assert instantiate(None, 1, x=2) is None


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_components_are_built_at_any_depth_with_their_interpolations(make):
    root = make({"size": 3, "model": {"_component_": f"{PARTS}.Model", "width": 4, "dropout": "${.width}"}})
    assert instantiate(root["model"]).dropout == 4
    node = {
        "_component_": f"{PARTS}.Tokenizer",
        "path": "p",
        "prompt_template": [{"_component_": f"{PARTS}.Template", "user": "u"}, {"plain": {"deep": 1}}],
    }
    tokenizer = instantiate(make(node))
    assert tokenizer.prompt_template[0].user == "u"
    assert tokenizer.prompt_template[1] == {"plain": {"deep": 1}}
    assert type(tokenizer.prompt_template) is list


def test_interpolation_of_a_node_sees_the_whole_config():
    cfg = OmegaConf.create({"dir": "d", "tokenizer": {"_component_": f"{PARTS}.Tokenizer", "path": "${dir}/t"}})
    assert instantiate(cfg.tokenizer).path == "d/t"


def test_arguments_are_passed_on_as_they_are():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = instantiate({"_component_": f"{PARTS}.Optimizer", "lr": 1.0}, parameters, lr=0.5)
    assert optimizer.params is parameters
    assert optimizer.lr == 0.5
    groups = [{"params": parameters, "lr": 1.0}]
    assert instantiate({"_component_": f"{PARTS}.Optimizer"}, params=groups).params is groups
    generator = (p for p in parameters)
    assert isinstance(instantiate({"_component_": "torch.optim.AdamW", "lr": 1e-3}, generator), torch.optim.AdamW)


def test_keywords_are_merged_over_the_config():
    node = {"_component_": "local_component", "value": {"a": 1, "b": {"c": 2}}}
    value, arguments = instantiate(node, value={"b": {"d": 3}}, extra={"_component_": f"{PARTS}.Template", "user": "x"})
    assert value == {"a": 1, "b": {"c": 2, "d": 3}}
    assert arguments["extra"].user == "x"
    assert node["value"] == {"a": 1, "b": {"c": 2}}


def test_positional_arguments_go_to_the_outermost_only():
    node = {"_component_": f"{PARTS}.Tokenizer", "prompt_template": {"_component_": f"{PARTS}.Template"}}
    tokenizer = instantiate(node, "path")
    assert (tokenizer.path, tokenizer.prompt_template.user) == ("path", "")


def test_names_without_dots_come_from_the_caller():
    assert instantiate({"_component_": "local_component", "value": 1}) == (1, {})
    assert instantiate({"_component_": "other"}, caller_globals={"other": dict}) == {}
    with pytest.raises(InstantiationError, match="there is no 'nowhere' in the recipe's file"):
        instantiate({"_component_": "nowhere"})


def test_members_of_classes_can_be_named():
    assert instantiate({"_component_": "builtins.dict.fromkeys"}, ["a"]) == {"a": None}


def test_nodes_without_a_valid_component_are_refused():
    with pytest.raises(ValueError, match="takes a mapping with a _component_ key, not list"):
        instantiate([1])
    with pytest.raises(InstantiationError, match=r"needs a _component_ key: this node has \['a'\]"):
        instantiate({"a": 1})
    with pytest.raises(InstantiationError, match="has no attribute 'Modl'; did you mean 'Model'"):
        instantiate({"_component_": f"{PARTS}.Modl"})
    with pytest.raises(InstantiationError, match="is a module, not a class or function"):
        instantiate({"_component_": PARTS})
    with pytest.raises(ValueError, match="a part between the dots is empty"):
        instantiate({"_component_": ".parts"})


@dataclass(kw_only=True)
class Inner:
    size: Annotated[int, Range(min=1)] = 1
    names: tuple[str, ...] = ()


class Outer(Configurable):
    @dataclass(kw_only=True)
    class Config:
        inner: Inner
        part: Component | None = None
        rate: float = 0.5

    def __init__(self, config: Config, *args: Any, **runtime: Any) -> None:
        self.config = config
        self.args = args
        self.runtime = runtime


def test_a_configurable_round_trips():
    data = {"inner": {"size": 3, "names": ["a"]}, "part": {"_component_": f"{PARTS}.Template"}, "rate": 1.0}
    built = Outer.Config.from_dict(data)
    assert built.inner == Inner(size=3, names=("a",))
    assert instantiate(built.part).user == ""
    assert built.to_dict() == data
    assert Outer.Config.from_dict(built.to_dict()) == built
    assert built.build(1, vocabulary=2).runtime == {"vocabulary": 2}


def test_a_configurable_is_a_component():
    node = {"_component_": f"{__name__}.Outer", "inner": {"size": 2}}
    instance = instantiate({**node, "_component_": "Outer"}, 7, vocabulary=5)
    assert isinstance(instance, Outer)
    assert (instance.config.inner.size, instance.args, instance.runtime) == (2, (7,), {"vocabulary": 5})
    assert instantiate({"_component_": f"{PARTS}.Sampler"}, vocab_size=3).vocab_size == 3


def test_mistakes_in_a_configurable_are_listed():
    with pytest.raises(ConfigError) as caught:
        Outer.Config.from_dict({"inner": {"size": 0, "nams": []}, "rat": 1})
    assert [str(mistake) for mistake in caught.value.errors] == [
        "inner.size: must be >= 1, not 0",
        "inner.nams: there is no such setting; did you mean 'names'?",
        "rat: there is no such setting; did you mean 'rate'?",
    ]
    with pytest.raises(ConfigError, match="top_p is a probability"):
        parts.Sampler.Config.from_dict({"top_p": 3})


def test_a_configurable_needs_a_dataclass():
    with pytest.raises(TypeError, match=r"Bad\.Config must be a dataclass"):

        class Bad(Configurable):
            class Config:
                pass
