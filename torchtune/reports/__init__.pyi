from ._compare import Comparison as Comparison
from ._model_card import model_card as model_card
from ._page import write_report as write_report
from ._run_folder import SETTINGS
from ._run_folder import RunFolder as RunFolder
from ._run_report import RunReport as RunReport
from ._verdict import Interval as Interval
from ._verdict import Verdict as Verdict
from ._verdict import compare_rows
from ._verdict import judge as judge
from ._verdict import paired_interval as paired_interval
