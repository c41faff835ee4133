"""Typed settings from YAML and dotted overrides, with errors a person can act on.

Every command reads its settings here; `cli.py` is the command line around it. Nothing heavy is imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from shards.base.errors import UserError
from shards.base.redact import redact

MAX_CONFIG_BYTES = 1 << 20


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Effect(Enum):
    """What a setting decides. A field without a mark changes the result."""

    RESULT = "changes the result"  # fixed on resume; runs that differ in it are never averaged
    INPUT = "may change on resume"  # path of an input: it decides the result until it is read, then it may move
    NONE = "only where or how fast"  # place, speed, memory, logs, limits: a finished result is the same


S = TypeVar("S", bound=Settings)
T = TypeVar("T")
Input = Annotated[T, Effect.INPUT]
NoEffect = Annotated[T, Effect.NONE]
Tree = dict[str, Any]


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [str(part) for part in value] if isinstance(value, list) else value


Names = Annotated[list[str], BeforeValidator(_split_commas)]  # written a,b,c, or as a list


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


def find_config(path: str | Path, shipped: Path | None = None) -> Path:
    """The file meant by --config. `digits` and `configs/digits.yaml` mean a shipped file where no such file is."""
    file = Path(path)
    if file.is_file():
        return file
    names = {own.stem: own for own in sorted(shipped.glob("*.yaml"))} if shipped else {}
    plain = file.parent in (Path(), Path("configs")) and file.suffix in ("", ".yaml", ".yml")
    if plain and file.stem in names:
        return names[file.stem]
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.y*ml")], 1)
    by_name = difflib.get_close_matches(file.stem, names, 1) if plain else []
    if near:
        hint = f" Did you mean {file.parent / near[0]}?"
    elif by_name:
        hint = f" Did you mean {by_name[0]}?"
    else:
        hint = " Check the path given with --config."
    known = f" Files that come along: {', '.join(names)}." if names else ""
    raise UserError(f"There is no config file {file}.{hint}{known}")


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file; plain data only."""
    file = find_config(path)
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
        raise UserError(f"'{redact(text)}' is not a setting. Write it as key=value, for example train.epochs=3.")
    try:
        value: Any = yaml.load(raw, _StrictLoader) if raw else ""
    except yaml.YAMLError:
        value = raw
    if isinstance(value, str) and raw[:1] not in ("'", '"'):  # what is quoted stays as it is
        if _is_number(value):  # YAML 1.1 reads 1e-3 as text
            value = float(value)
        elif " #" in raw:  # a path, not a comment
            value = raw
    return nest(key.split("."), value)


def nest(keys: list[str], value: Any) -> Tree:
    """["a", "b"], 3 as {"a": {"b": 3}}."""
    tree: Any = value
    for key in reversed(keys):
        tree = {key: tree}
    return dict(tree)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip().lower() not in ("nan", "inf", "-inf", "infinity", "-infinity")


def validate(schema: type[S], tree: Tree, prog: str) -> S:
    """The typed settings, or a UserError naming every wrong key and value."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        problems = [_sentence(schema, item) for item in error.errors()]
        raise UserError("\n".join(dict.fromkeys(problems)) + f"\n{prog} --help lists every setting.") from None


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


@cache
def effects(schema: type[Settings]) -> dict[str, Effect]:
    """The mark of every setting by dotted name. A mark on a group holds for all settings inside it."""
    out: dict[str, Effect] = {}
    for key, effect in _walk_effects(schema, "", None):
        # Methods may share an option's name; the name counts if it counts for one of them.
        out[key] = Effect.RESULT if out.get(key, effect) is not effect else effect
    return out


def _walk_effects(schema: type[Settings], prefix: str, group: Effect | None) -> Iterator[tuple[str, Effect]]:
    for key, field in schema.model_fields.items():
        mark = group or next((item for item in field.metadata if isinstance(item, Effect)), None)
        models = models_of(field)
        for model in models:
            yield from _walk_effects(model, f"{prefix}{key}.", mark)
        if not models:
            yield prefix + key, mark or Effect.RESULT


def effect_of(schema: type[Settings], key: str) -> Effect:
    """The mark of a dotted name, also of an entry of a mapping (`tracking.tags.team`). Unknown names change the result."""
    known = effects(schema)
    while key:
        if key in known:
            return known[key]
        key = key.rpartition(".")[0]
    return Effect.RESULT


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
        name = f"{name}.name" if kind == "union_tag_invalid" else re.sub(r"\.\d+$", "", name)  # an entry of a list
        near = difflib.get_close_matches(str(wrong), names, 1, 0.4)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"{name}: '{redact(str(wrong))}' is not one of {', '.join(names)}.{hint}"
    if kind == "missing":
        meaning = next((field.description for key, field, _ in _fields_at(schema, place) if key == place[-1]), "")
        return f"{name} is missing{f': {meaning}' if meaning else ''}. Write {name}=..."
    if kind in ("model_type", "model_attributes_type"):
        inside = [f"{name}.{key}" for key, _, _ in _fields_at(schema, [*place, ""])]
        return f"{name} is a group of settings. Set one of {', '.join(inside)}."
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if isinstance(value, dict) else f" (got {redact(repr(value))})"
    return (
        f"{name or 'The settings'}: {message}{shown}."
        if not message.endswith(".")
        else f"{name}: {message}".lstrip(": ")
    )


def _public_name(schema: type[Settings], place: list[str]) -> str:
    """Drop the tags pydantic puts behind unions (`method.prototypical.x` -> `method.x`, `model.freeze.bool` -> `model.freeze`)."""
    place = [part for part in place if part not in ("bool", "constrained-int", "constrained-float")]
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
        models = models_of(field) if field else []
        skip, union = len(models) > 1, models
        model = models[0] if len(models) == 1 else None
    return ".".join(out)


def models_of(field: FieldInfo) -> list[type[Settings]]:
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
        models = models_of(field) if field else []
    return [(key, field, model) for model in models[:1] for key, field in model.model_fields.items()]
