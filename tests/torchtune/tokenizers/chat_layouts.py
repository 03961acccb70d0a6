# ruff: noqa: RUF001  (special tokens with full-width bars)
"""The table of chat templates: a new layout adds a row."""

from functools import partial

from tests.torchtune.tokenizers import chat_templates as plain
from tests.torchtune.tokenizers import chat_templates_harmony as harmony
from tests.torchtune.tokenizers import chat_templates_mistral as mistral
from tests.torchtune.tokenizers import chat_templates_tools as tools
from tests.torchtune.tokenizers.chat_case import Case, blocks, prefixed, with_default

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = ["<tool_call>", "</tool_call>"]
THINK = ["<think>", "</think>"]
GEMMA4 = ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"]
PHI = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
chatml = blocks("<|im_start|>", "\n", "<|im_end|>")
im = partial(Case, special=IM, eos="<|im_end|>")
qwen3 = partial(im, template=tools.QWEN3, tool=True, calls=True, reasoning="reasoning_content", plain=[*QWEN, *THINK])
smollm3 = partial(im, template=tools.SMOLLM3, tool=True, plain=THINK)
llama3 = partial(Case, special=HEADERS, eos="<|eot_id|>", bos="<|begin_of_text|>", tool=True)
instruct = partial(Case, special=["<s>", "</s>"], eos="</s>", bos="<s>")
tekken = partial(instruct, tool=True, calls=True, shows_tools=True)
gemma4 = partial(Case, template=plain.GEMMA4, special=GEMMA4, eos="<eos>", bos="<bos>")
phi = partial(Case, special=PHI, eos="<|endoftext|>")

CASES = [
    im("chatml", plain.CHATML, chatml, tool=True),
    im(
        "smollm2",
        plain.SMOLLM2,
        with_default("You are a helpful AI assistant named SmolLM", chatml),
        bos="<|im_start|>",
        tool=True,
    ),
    llama3(
        "llama3",
        plain.LLAMA3,
        prefixed("<|begin_of_text|>", blocks("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", True)),
    ),
    llama3("llama3_1", tools.LLAMA3_1, tools.llama3_1, calls=True, one_call=True, shows_tools=True),
    im(
        "qwen2_5",
        tools.QWEN2_5,
        with_default("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", tools.qwen2_5),
        tool=True,
        calls=True,
        plain=QWEN,
    ),
    qwen3("qwen3", truth=tools.qwen3(thinks=True)),
    qwen3("qwen3_no_think", truth=tools.qwen3(thinks=False), switches={"enable_thinking": False}),
    instruct("mistral", plain.MISTRAL, plain.mistral),
    instruct("mistral_last", plain.MISTRAL_LAST, plain.mistral_last, special=["<s>", "</s>", "[INST]", "[/INST]"]),
    instruct("llama2", plain.LLAMA2, plain.llama2),
    phi("phi3", plain.PHI3, plain.phi3),
    instruct("zephyr", plain.ZEPHYR, blocks("<|", "|>\n", "</s>")),
    Case(
        "deepseek_r1",
        plain.DEEPSEEK_R1,
        plain.deepseek,
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        plain=THINK,
    ),
    Case(
        "glm4",
        plain.GLM4,
        plain.glm4,
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|endoftext|>",
        closes=False,
    ),
    im("marked", plain.MARKED, chatml, tool=True),
    Case(
        "gemma3",
        plain.GEMMA3,
        plain.gemma3,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<eos>",
        bos="<bos>",
    ),
    gemma4("gemma4", truth=plain.gemma4(thinks=False)),
    gemma4("gemma4_think", truth=plain.gemma4(thinks=True), switches={"enable_thinking": True}),
    Case("olmo2", plain.OLMO2, plain.olmo2, ["<|endoftext|>"], "<|endoftext|>", bos="<|endoftext|>"),
    phi("phi3_released", plain.PHI3, plain.phi3, takes_spaces=PHI[1:]),
    phi(
        "phi4_mini",
        tools.PHI4_MINI,
        tools.phi4_mini,
        special=[*PHI, "<|tool|>", "<|/tool|>"],
        tool=True,
        shows_tools=True,
    ),
    smollm3("smollm3", truth=tools.smollm3("/think")),
    smollm3("smollm3_no_think", truth=tools.smollm3("/no_think"), switches={"enable_thinking": False}),
    tekken("mistral_v3_tekken", mistral.V3_TEKKEN, mistral.v3(""), special=mistral.CONTROL[:10]),
    tekken("mistral_v7_tekken", mistral.V7_TEKKEN, mistral.v7_tekken, special=mistral.CONTROL),
    Case(
        "gpt_oss",
        harmony.HARMONY,
        harmony.harmony,
        harmony.CONTROL,
        "<|return|>",
        bos="<|startoftext|>",
        calls=True,
        one_call=True,
        shows_tools=True,
        reasoning="thinking",
        ends=["<|end|>"],
        stops=["<|return|>", "<|endoftext|>", "<|call|>"],
        switches={"current_date": "2025-06-28", "reasoning_effort": "low"},
    ),
]
