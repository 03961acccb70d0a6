"""Checking a YAML text against the typed fixture recipe."""

from pathlib import Path

import pytest

from tests.torchtune.config.assets import typed_recipe
from torchtune import config
from torchtune.config import ConfigError

ASSETS = Path(__file__).parent / "assets"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check the typed fixture, with overrides and with pieces of its text replaced, as the file ``c.yaml``."""
    monkeypatch.chdir(tmp_path)

    def check(*overrides: str, replace: dict[str, str] | None = None) -> typed_recipe.Settings:
        text = (ASSETS / "typed.yaml").read_text()
        for old, new in (replace or {}).items():
            assert old in text
            text = text.replace(old, new, 1)
        Path("c.yaml").write_text(text)
        return config.load_and_check("c.yaml", overrides, typed_recipe.recipe_main)

    return check


@pytest.fixture
def mistakes(check):
    """The mistakes that ``check`` finds, as lines of text."""

    def mistakes(*overrides: str, replace: dict[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            check(*overrides, replace=replace)
        return [str(mistake) for mistake in caught.value.errors]

    return mistakes
