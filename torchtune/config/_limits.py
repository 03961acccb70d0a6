"""Limits on the size of a config, checked on parser events before anything recurses into it."""

import yaml

MAX_BYTES = 2**20
# Counted with aliases expanded; the largest shipped config has about a hundred values.
MAX_DEPTH = 64
MAX_VALUES = 20_000


class TooLarge(yaml.MarkedYAMLError):
    """YAML that exceeds a size limit; the text after the excess is not read."""


def check_size(text: str, loader: yaml.SafeLoader) -> None:
    """Raise if a text is too long, too deeply nested, or too large with its aliases expanded.

    The parser yields events without recursion. Composing nodes from them recurses in C, and nested aliases expand
    exponentially (ten aliases of ten aliases, eight levels deep: 100 million values). So the events are counted first.

    Args:
        text: the YAML text.
        loader: a fresh loader of ``text``; its events are used up.

    Raises:
        TooLarge: a limit is exceeded; has the line.
        yaml.YAMLError: the text is not YAML.
    """
    if len(text) > MAX_BYTES:
        raise TooLarge(problem=f"is longer than {MAX_BYTES // 2**20} MiB: a config is a page of settings")
    anchors: dict[str, tuple[int, int]] = {}  # anchor -> number of values and depth that its alias expands to
    open_nodes: list[tuple[str | None, int, int]] = []  # anchor, values and depth inside so far
    total = 0
    while loader.check_event():
        event = loader.get_event()
        done: tuple[str | None, int, int] | None = None
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1, 0))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, depth = open_nodes.pop()
            done = anchor, values, depth + 1
        elif isinstance(event, yaml.AliasEvent):
            done = None, *anchors.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            done = event.anchor, 1, 0
        if done is not None:
            anchor, values, depth = done
            total = values
            if anchor is not None:
                anchors[anchor] = values, depth
            if open_nodes:
                parent = open_nodes.pop()
                total = parent[1] + values
                open_nodes.append((parent[0], total, max(parent[2], depth)))
        if len(open_nodes) + (done[2] if done else 0) > MAX_DEPTH:
            raise TooLarge(problem=f"nests more than {MAX_DEPTH} levels deep", problem_mark=event.start_mark)
        if total > MAX_VALUES:
            reason = f"holds more than {MAX_VALUES:,} keys and values, those counted that its aliases stand for"
            raise TooLarge(problem=reason, problem_mark=event.start_mark)
