"""Convert a checkpoint's Jinja chat template to Ollama's format, in Go's template language."""

import re
from typing import Any

from torchtune.data import DataError

_TURNS = re.compile("(Text\ue010\\w\ue011)")
_LAST = "{{ $end := 0 }}{{ range $i, $_ := .Messages }}{{ $end = $i }}{{ end }}"
_REFUSAL = "its chat template writes turns that a Modelfile's TEMPLATE cannot express"


def go_template(tokenizer: Any, *, adds_bos: bool) -> str:
    """Return a chat template for Ollama with the layout of a tokenizer's chat template.

    The texts around turns are learned from renderings of conversations with and without a system turn, which may come
    first or inside the last turn of the user. Tool turns are omitted.

    Args:
        tokenizer: a :class:`HuggingFaceModelTokenizer`.
        adds_bos: whether the program that renders the template adds the BOS token itself.

    Returns:
        A template for the fields ``System`` and ``Messages``, each with ``Role`` and ``Content``.

    Raises:
        DataError: there is no chat template, or the texts around a turn depend on more than its role.

    Example:
        >>> torchtune.tokenizers.go_template(tokenizer, adds_bos=False)[-9:]
        '{{ end }}'
    """
    bos = "" if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False)

    def around(roles: str) -> tuple[str, list[str]]:
        names = {"s": "system", "u": "user", "a": "assistant"}
        turns = [{"role": names[role], "content": f"Text\ue010{role}\ue011"} for role in roles]
        pieces = _TURNS.split(tokenizer.render_template(turns, add_generation_prompt=True))
        texts = [pieces[0].removeprefix(bos) if adds_bos and bos else pieces[0], *pieces[2::2]]
        if any("{{" in text or '"""' in text for text in texts):
            raise DataError(f"{_REFUSAL}: they hold {{{{ or quotes.")
        return "".join(piece[5] for piece in pieces[1::2]), texts

    order, (before, answer, after, end) = around("uau")
    if around("u") != ("u", [before, end]) or around("uauau")[1] != [before, answer, after, answer, after, end]:
        raise DataError(f"{_REFUSAL}: earlier turns are written otherwise than the last.")
    start, inside = before, ""
    try:
        order, (first, *rest) = around("suau")
    except DataError:  # the template does not accept a system turn
        order = "none"
    if order == "suau" and rest[1:] == [answer, after, end]:
        start = f"{{{{ if .System }}}}{first}{{{{ .System }}}}{rest[0]}{{{{ else }}}}{before}{{{{ end }}}}"
    elif order == "uasu" and [first, rest[0], rest[1], rest[3]] == [before, answer, after, end]:
        inside = f"{{{{ if and $.System (eq $i $end) }}}}{{{{ $.System }}}}{rest[2]}{{{{ end }}}}"
    elif order != "none":
        raise DataError(f"{_REFUSAL}: the system turn changes others.")
    ends = answer if answer == end else f"{{{{ if eq $i $end }}}}{end}{{{{ else }}}}{answer}{{{{ end }}}}"
    user = f'{{{{ if eq .Role "user" }}}}{inside}{{{{ .Content }}}}{ends}'
    assistant = f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{{{{ if ne $i $end }}}}{after}{{{{ end }}}}'
    return f"{_LAST}{start}{{{{ range $i, $_ := .Messages }}}}{user}{assistant}{{{{ end }}}}{{{{ end }}}}"
