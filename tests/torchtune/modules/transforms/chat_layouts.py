# ruff: noqa: RUF001  (special tokens with full-width bars)
"""The table of chat templates: a new layout adds a row."""

from tests.torchtune.modules.transforms import chat_templates as plain
from tests.torchtune.modules.transforms import chat_templates_tools as tools
from tests.torchtune.modules.transforms.chat_case import Case, blocks, prefixed, with_default

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = ["<tool_call>", "</tool_call>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
TURNS = [f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")]
chatml = blocks("<|im_start|>", "\n", "<|im_end|>")

CASES = [
    Case("chatml", plain.CHATML, chatml, IM, "<|im_end|>", tool=True),
    Case(
        "smollm2",
        plain.SMOLLM2,
        with_default("You are a helpful AI assistant named SmolLM", chatml),
        IM,
        "<|im_end|>",
        bos="<|im_start|>",
        tool=True,
    ),
    Case(
        "llama3",
        plain.LLAMA3,
        prefixed("<|begin_of_text|>", blocks("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", True)),
        HEADERS,
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        tool=True,
    ),
    Case(
        "llama3_dated",
        plain.LLAMA3_DATED,
        plain.llama3_dated,
        HEADERS,
        "<|end_of_text|>",
        bos="<|begin_of_text|>",
        tool=True,
    ),
    Case(
        "qwen2_5",
        tools.QWEN2_5,
        with_default("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", tools.qwen2_5),
        IM,
        "<|im_end|>",
        tool=True,
        plain=QWEN,
    ),
    Case("qwen3", tools.QWEN3, tools.qwen3, IM, "<|im_end|>", tool=True, plain=[*QWEN, "<think>", "</think>"]),
    Case("mistral", plain.MISTRAL, plain.mistral, ["<s>", "</s>"], "</s>", bos="<s>"),
    Case(
        "mistral_last", plain.MISTRAL_LAST, plain.mistral_last, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>", bos="<s>"
    ),
    Case("llama2", plain.LLAMA2, plain.llama2, ["<s>", "</s>"], "</s>", bos="<s>"),
    Case(
        "gemma",
        plain.GEMMA,
        plain.gemma,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<eos>",
        bos="<bos>",
        system=False,
    ),
    Case(
        "phi3",
        plain.PHI3,
        plain.phi3,
        ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "<|endoftext|>",
    ),
    Case("phi4", plain.PHI4, blocks("<|im_start|>", "<|im_sep|>", "<|im_end|>", ""), [*IM, "<|im_sep|>"], "<|im_end|>"),
    Case("zephyr", plain.ZEPHYR, blocks("<|", "|>\n", "</s>"), ["<s>", "</s>"], "</s>", bos="<s>"),
    Case(
        "deepseek_r1",
        plain.DEEPSEEK_R1,
        plain.deepseek,
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        plain=["<think>", "</think>"],
    ),
    Case(
        "glm4",
        plain.GLM4,
        plain.glm4,
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|endoftext|>",
        closes=False,
    ),
    Case(
        "granite",
        plain.GRANITE,
        with_default(
            "You are Granite, developed by IBM.", blocks("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
        ),
        ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
        "<|end_of_text|>",
    ),
    Case(
        "command_r",
        plain.COMMAND_R,
        plain.command_r,
        ["<BOS_TOKEN>", *TURNS],
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    Case("marked", plain.MARKED, chatml, IM, "<|im_end|>", tool=True),
]
