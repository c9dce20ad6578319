"""Renders messages as text, and finds the assistant's parts in it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lockstep.files.untrusted import open_regular

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]  # (messages, whether the assistant's header follows)
LARGEST = 1 << 20  # bytes of a template


class Unusable(ValueError):
    """The reason why a row is refused."""


def render_chatml(messages: Messages, header: bool) -> str:
    """Render messages for a tokenizer without a template."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" * header


def compile_template(template: str, special: dict[str, str]) -> Render:
    """Compile a chat template, in jinja2's sandbox, that renders as transformers does.

    It knows no date: a text must not change with the day.

    Args:
        special: what the template calls bos_token, eos_token ...
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag around what an assistant says, which `find_spans` finds by itself."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    extensions = ["jinja2.ext.loopcontrols", Generation]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's is for HTML
    environment.globals["raise_exception"] = refuse
    absent = {"tools": None, "documents": None}  # which is not what is undefined
    compiled = None

    def render(messages: Messages, header: bool) -> str:
        nonlocal compiled
        try:
            compiled = compiled or environment.from_string(template)
            return compiled.render(
                special, messages=messages, add_generation_prompt=header, **absent
            )
        except Exception as why:  # whatever the template does
            problem = str(why) or type(why).__name__
            raise Unusable(f"the chat template refuses it: {problem[:100]}") from None

    return render


def read_template(folder: Path, about: dict[str, Any], links: bool = True) -> str:
    """Read chat_template.jinja, or what tokenizer_config.json has; "" where there is none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        with open_regular(file, limit=LARGEST, links=links) as stream:
            return stream.read().decode()
    found = about.get("chat_template", "")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if type(each) is dict}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def find_spans(messages: Any, render: Render) -> tuple[str, list[tuple[int, int]]]:
    """Render messages, and find where in the text an assistant's are, with what ends them.

    A message's part is what the text grows by when it is added, less the assistant's header.

    Raises:
        Unusable: these are no messages, none is an assistant's, or the text is no longer the former
            one and more when a message is added.
    """
    if not isinstance(messages, list) or not messages:
        raise Unusable("messages is no list of messages")
    for number, message in enumerate(messages):
        fields = ("role", "content")
        if not isinstance(message, dict) or any(type(message.get(f)) is not str for f in fields):
            raise Unusable(f"message {number + 1} has no role and content that are text")
    found, text = [], ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:number], True)
            text = render(messages[: number + 1], False)
            if not text.startswith(before):
                raise Unusable(f"the chat template does not begin message {number + 1} anew")
            found.append((len(before), len(text)))
    whole = render(messages, False)
    if not found:
        raise Unusable("no message is an assistant's")
    if not whole.startswith(text):
        raise Unusable("the chat template rewrites earlier messages")
    return whole, found
