"""The command line of every command: `command [WORDS] [--config FILE] [key=value ...]`.

Nothing heavy is imported, so `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, get_args

from shards.base.errors import EXIT_USER_ERROR, UserError
from shards.base.settings import S, Settings, Tree, merge, models_of, parse_override, read_yaml, to_yaml, validate


def parse_arguments(argv: list[str], prog: str, about: str, schema: type[Settings]) -> tuple[Tree, Tree, bool]:
    """(file tree, override tree, print only?) from a command line; answers --help itself."""
    file_tree: Tree = {}
    overrides: Tree = {}
    print_only = False
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            print_help(prog, about, schema)
            raise SystemExit(0)
        if word == "--print-config":
            print_only = True
        elif word == "--config" or word.startswith("--config="):
            path = word.partition("=")[2] or next(words, "")
            if not path:
                raise UserError("--config needs a file: --config configs/digits.yaml")
            file_tree = merge(file_tree, read_yaml(path))
        elif word.startswith("-"):
            raise UserError(f"There is no option {word}. Settings are written as key=value; {prog} --help lists them.")
        else:
            overrides = merge(overrides, parse_override(word))
    return file_tree, overrides, print_only


def load(schema: type[S], argv: list[str], prog: str, about: str, base: Callable[[Tree, Tree], Tree] = merge) -> S:
    """Settings of a command from its arguments. `base` combines the file's tree with the overrides."""
    file_tree, overrides, print_only = parse_arguments(argv, prog, about, schema)
    settings = validate(schema, base(file_tree, overrides), prog)
    if print_only:
        print(to_yaml(settings), end="")
        raise SystemExit(0)
    return settings


def walk(schema: type[Settings], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every setting, in order."""
    for key, field in schema.model_fields.items():
        models = models_of(field)
        if len(models) == 1:
            yield from walk(models[0], f"{prefix}{key}.")
        elif models:
            for model in models:
                name = model.model_fields["name"].default
                meaning = (model.__doc__ or "").strip().splitlines()[0]
                yield f"{prefix}{key}.name={name}", "", "", meaning
                for row in walk(model, f"{prefix}{key}."):
                    if row[0] != f"{prefix}{key}.name":
                        yield f"  {row[0]}", *row[1:]
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            yield prefix + key, _type_name(field.annotation), _shown(default), field.description or ""


def _type_name(kind: Any) -> str:
    args = get_args(kind)
    if not args:
        return "none" if kind is type(None) else getattr(kind, "__name__", str(kind))
    if all(isinstance(a, str) for a in args):
        return " | ".join(args)
    if getattr(kind, "__origin__", None) in (list, tuple, dict):
        return f"{kind.__origin__.__name__}[{', '.join(_type_name(a) for a in args if a is not ...)}]"
    return " | ".join(_type_name(a) for a in args if isinstance(a, type) or get_args(a))


def _shown(value: Any) -> str:
    return "''" if value == "" else str(list(value) if isinstance(value, tuple) else value)


def print_help(prog: str, about: str, schema: type[Settings]) -> None:
    print(f"usage: {prog} [--config FILE] [--print-config] [--help] [key=value ...]\n\n{about}\n")
    print("Later settings win: defaults, then FILE, then key=value. Settings (type, default, meaning):\n")
    for key, kind, default, meaning in walk(schema):
        head = f"  {key}" + (f" ({kind}, default {default})" if kind else "")
        print(f"{head}\n        {meaning}" if meaning else head)


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command: a UserError becomes one clear message and exit code 2; nothing else is hidden."""
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        if os.environ.get("EVENHAND_TRACEBACK"):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        print("stopped. The same command may be given again.", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    raise SystemExit(code or 0)
