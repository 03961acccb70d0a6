"""Results of a run: its folder, a verdict, a page, a comparison with other runs, and a model card."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Comparison": "_compare",
        "Interval": "_judge",
        "RunFolder": "_run_folder",
        "RunReport": "_run_report",
        "Verdict": "_judge",
        "judge": "_judge",
        "model_card": "_model_card",
        "paired_interval": "_judge",
        "write_report": "_page",
    },
    between_rooms={"SETTINGS": "_run_folder", "compare_rows": "_judge"},
)
