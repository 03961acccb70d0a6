from ._document import Document, apply_overrides, read_document
from ._errors import ConfigError as ConfigError
from ._errors import InstantiationError as InstantiationError
from ._errors import did_you_mean
from ._instantiate import Configurable as Configurable
from ._instantiate import instantiate as instantiate
from ._locate import as_written
from ._locate import locate as locate
from ._parse import load_and_check as load_and_check
from ._parse import parse as parse
from ._parse import validate as validate
from ._save import log_config as log_config
from ._save import save_config as save_config
from ._save import to_dict as to_dict
from ._save import to_yaml
from ._schema import CheckpointerComponent as CheckpointerComponent
from ._schema import Component as Component
from ._schema import DatasetComponent as DatasetComponent
from ._schema import LossComponent as LossComponent
from ._schema import ObjectPath as ObjectPath
from ._schema import OptimizerComponent as OptimizerComponent
from ._schema import PositiveInt as PositiveInt
from ._schema import Range as Range
from ._schema import RuntimeArgs as RuntimeArgs
from ._schema import SchedulerComponent as SchedulerComponent
from ._schema import describe_settings as describe_settings
from ._schema import settings_of as settings_of
from ._secrets import redact_secrets
from ._settings_view import RecipeSettingsError as RecipeSettingsError
from ._settings_view import SettingsView as SettingsView
