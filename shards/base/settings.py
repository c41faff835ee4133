"""Typed settings from YAML and dotted overrides, with errors a person can act on.

Every command of the project (`shards.build`, `pipeline.train`, ...) reads its settings here. Nothing heavy is
imported, so that `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

MAX_CONFIG_BYTES = 1 << 20
EXIT_USER_ERROR = 2


class UserError(Exception):
    """Something the person at the keyboard can fix. The message says what, where, and what to do."""


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)
Tree = dict[str, Any]


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that also refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UserError(f"line {key_node.start_mark.line + 1}: the key '{key}' stands twice; keep one of them.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file; plain data only."""
    file = Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.y*ml")], 1)
        hint = f" Did you mean {file.parent / near[0]}?" if near else " Check the path given with --config."
        raise UserError(f"There is no config file {file}.{hint}")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(f"{file} is larger than 1 MiB; a config file holds settings only.")
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), _StrictLoader)
    except UserError as error:
        raise UserError(f"{file}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        place = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "it is not text in UTF-8"
        raise UserError(f"{file}{place}: not valid YAML ({problem}). Correct the file.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{file} must hold `key: value` lines, not a {type(tree).__name__}.")
    return tree


def merge(base: Tree, over: Tree) -> Tree:
    """`over` laid upon `base`, section by section; neither is changed."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def parse_override(text: str) -> Tree:
    """`a.b=3` becomes {'a': {'b': 3}}; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise UserError(f"'{text}' is not a setting. Write it as key=value, for example train.epochs=3.")
    try:
        value: Any = yaml.load(raw, _StrictLoader) if raw else ""
    except yaml.YAMLError:
        value = raw
    if isinstance(value, str) and raw[:1] not in ("'", '"'):  # what is quoted stays as it is
        if _is_number(value):  # YAML 1.1 reads 1e-3 as text
            value = float(value)
        elif " #" in raw:  # a path, not a comment
            value = raw
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip().lower() not in ("nan", "inf", "-inf", "infinity", "-infinity")


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


def validate(schema: type[S], tree: Tree, prog: str) -> S:
    """The typed settings, or a UserError naming every wrong key and value."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        problems = [_sentence(schema, item) for item in error.errors()]
        raise UserError("\n".join(dict.fromkeys(problems)) + f"\n{prog} --help lists every setting.") from None


def load(schema: type[S], argv: list[str], prog: str, about: str, base: Callable[[Tree, Tree], Tree] = merge) -> S:
    """Settings of a command from its arguments. `base` combines the file's tree with the overrides."""
    file_tree, overrides, print_only = parse_arguments(argv, prog, about, schema)
    settings = validate(schema, base(file_tree, overrides), prog)
    if print_only:
        print(to_yaml(settings), end="")
        raise SystemExit(0)
    return settings


def to_yaml(settings: Settings) -> str:
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} as {'a.b': 1}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out


def output_folder(path: Path) -> Path:
    """The folder for a command's results, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be a folder for results ({error.strerror}). Choose another.") from None
    return path


def _sentence(schema: type[Settings], item: Any) -> str:
    kind = item["type"]
    place = [str(p) for p in item["loc"]]
    name = _public_name(schema, place)
    value = item.get("input")
    if kind == "extra_forbidden":
        siblings = [key for key, _, _ in _fields_at(schema, place)]
        near = difflib.get_close_matches(place[-1], siblings, 1, 0.5)
        parent = name.rpartition(".")[0]
        hint = (
            f"Did you mean '{parent + '.' if parent else ''}{near[0]}'?"
            if near
            else f"Known here: {', '.join(siblings)}."
        )
        return f"There is no setting '{name}'. {hint}"
    if kind in ("union_tag_invalid", "literal_error"):
        allowed = item["ctx"].get("expected_tags") or item["ctx"].get("expected")
        names = [word.strip("' ") for word in str(allowed).replace(" or ", ", ").split(",")]
        wrong = item["ctx"].get("tag") or value
        name = f"{name}.name" if kind == "union_tag_invalid" else name
        near = difflib.get_close_matches(str(wrong), names, 1, 0.4)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"{name}: '{wrong}' is not one of {', '.join(names)}.{hint}"
    if kind in ("model_type", "model_attributes_type"):
        inside = [f"{name}.{key}" for key, _, _ in _fields_at(schema, [*place, ""])]
        return f"{name} is a group of settings. Set one of {', '.join(inside)}."
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if isinstance(value, dict) else f" (got {value!r})"
    return (
        f"{name or 'The settings'}: {message}{shown}."
        if not message.endswith(".")
        else f"{name}: {message}".lstrip(": ")
    )


def _public_name(schema: type[Settings], place: list[str]) -> str:
    """Drop the tag pydantic puts behind a discriminated union (`method.prototypical.x` -> `method.x`)."""
    out: list[str] = []
    model: Any = schema
    skip = False
    union: list[type[Settings]] = []
    for part in place:
        if skip:
            skip = False
            model = next((m for m in union if m.model_fields["name"].default == part), None)
            continue
        out.append(part)
        field = model.model_fields.get(part) if model is not None else None
        models = _models_of(field) if field else []
        skip, union = len(models) > 1, models
        model = models[0] if len(models) == 1 else None
    return ".".join(out)


def _models_of(field: FieldInfo) -> list[type[Settings]]:
    found: list[type[Settings]] = []

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Settings):
            found.append(kind)
        for inner in get_args(kind):
            visit(inner)

    visit(field.annotation)
    return found


def _fields_at(schema: type[Settings], place: list[str]) -> list[tuple[str, FieldInfo, type[Settings]]]:
    """The fields that stand beside the last word of `place`."""
    models: list[type[Settings]] = [schema]
    for part in place[:-1]:
        if len(models) > 1:
            models = [m for m in models if m.model_fields["name"].default == part]
            continue
        field = models[0].model_fields.get(part) if models else None
        models = _models_of(field) if field else []
    return [(key, field, model) for model in models[:1] for key, field in model.model_fields.items()]


def walk(schema: type[Settings], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every setting, in order."""
    for key, field in schema.model_fields.items():
        models = _models_of(field)
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
