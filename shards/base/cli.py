"""The command line of every command: `command WORDS [--config FILE] [key=value ...]`.

A command declares its settings as a class. Some settings may be given as plain words, without `key=`. Nothing heavy is
imported, so `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from shards.base import interrupt
from shards.base.errors import EXIT_USER_ERROR, UserError
from shards.base.redact import redact
from shards.base.settings import (
    S,
    Settings,
    Tree,
    find_config,
    merge,
    models_of,
    nest,
    parse_override,
    read_yaml,
    to_yaml,
    validate,
)

_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_names: dict[str, str] = {}  # `python -m pipeline.train` -> `evenhand train`, when started as evenhand


def use_names(names: Mapping[str, str]) -> None:
    """Show commands by other names in help and errors."""
    _names.update(names)


def command_name(prog: str) -> str:
    return _names.get(prog, prog)


class Setting(NamedTuple):
    """One setting of a command, as `--help` and the shell's completion show it."""

    key: str  # with its groups: train.epochs
    annotation: Any  # None: the heading of one choice of a group, such as method.name=elr
    default: Any
    meaning: str
    choice: str = ""  # the choice of a group it belongs to, such as method.name=elr

    @property
    def required(self) -> bool:
        return self.default is ...

    @property
    def is_dict(self) -> bool:
        return get_origin(self.annotation) is dict

    @property
    def values(self) -> list[str]:
        """The values it may have, if they are few."""
        if self.annotation is bool:
            return ["true", "false"]
        annotation = self.annotation
        if get_origin(annotation) is list:
            annotation = get_args(annotation)[0]
        if get_origin(annotation) is Literal:
            return [str(value) for value in get_args(annotation)]
        return []


@dataclass(frozen=True)
class Command(Generic[S]):
    """What a command takes."""

    prog: str  # `python -m pipeline.audit`
    about: str
    schema: type[S]
    words: tuple[str, ...] = ()  # settings given without `key=`, in this order; a list takes all words that are left
    combine: Callable[[Tree, Tree], Tree] = merge  # of the file's settings with those of the command line
    configs: Path | None = None  # folder of config files that may be given by name
    options: tuple[tuple[str, str], ...] = ()  # further ones with their meaning; the command takes them itself
    passes_on: str = ""  # what may follow a `--`, for example "settings of the training"

    def load(self, argv: list[str]) -> S:
        """The settings from the command line. Answers --help and --print-config itself."""
        if {"-h", "--help"} & set(argv):
            self.print_help()
            raise SystemExit(0)
        file_tree, overrides, print_only = self._parse(argv)
        tree = self.combine(file_tree, overrides)
        for key in self.words:
            if key not in tree:
                meaning = self.schema.model_fields[key].description
                raise UserError(f"{key.upper()} is missing: {meaning}. Write: {self._usage()} [key=value ...]")
        settings = validate(self.schema, tree, command_name(self.prog))
        if print_only:
            print(to_yaml(settings), end="")
            raise SystemExit(0)
        return settings

    def load_own(self, argv: list[str]) -> tuple[S, list[str]]:
        """For a command that starts another: its own settings, and what it passes on."""
        own, rest = split_passed_on(argv)
        try:
            return self.load(own), rest or []
        except UserError as error:
            if "There is no setting" in str(error) or "There is no option" in str(error):
                after = self.passes_on[:1].upper() + self.passes_on[1:]
                raise UserError(f"{error}\n{after} stand after a `--`.") from None
            raise

    def trees(self, argv: list[str]) -> tuple[Tree, Tree]:
        """(settings of the files, settings of the command line), not checked yet."""
        return self._parse(argv)[:2]

    def _parse(self, argv: list[str]) -> tuple[Tree, Tree, bool]:
        """(settings of the files, settings of the command line, print only?)"""
        file_tree: Tree = {}
        overrides: Tree = {}
        plain: list[str] = []
        print_only = False
        arguments = iter(enumerate(argv, 1))
        for following, word in arguments:
            if word == "--print-config":
                print_only = True
            elif word == "--config" or word.startswith("--config="):
                path = word.partition("=")[2] or next(arguments, (0, ""))[1]
                if not path:
                    raise UserError("--config needs a file: --config configs/digits.yaml")
                file_tree = merge(file_tree, read_yaml(find_config(path, self.configs)))
            elif word.startswith("-") and word != "-":
                raise UserError(redact(self._explain_option(word, argv[following:])))
            elif self._is_setting(word):
                overrides = merge(overrides, self._read_setting(word))
            else:
                plain.append(word)
        return file_tree, merge(overrides, self._name_words(plain, overrides)), print_only

    def _is_setting(self, word: str) -> bool:
        if not self.words:
            return True
        key, equals, _ = word.partition("=")
        if not equals:
            return False
        known = key.split(".")[0] in self.schema.model_fields
        return known or (bool(_KEY.fullmatch(key)) and not Path(word).exists())  # a file may be called lr=0.1

    def _read_setting(self, word: str) -> Tree:
        """`key=value` as a tree. A setting that holds text takes the value as it stands: a folder may be called 2024."""
        key, _, raw = word.partition("=")
        setting = self._find(key)
        if setting is None or not _takes_text(setting, raw):
            return parse_override(word)
        if setting.is_dict and key != setting.key:
            return nest([*setting.key.split("."), key[len(setting.key) + 1 :]], raw)
        return nest(key.split("."), raw)

    def _find(self, key: str) -> Setting | None:
        for setting in settings_of(self.schema):
            if setting.annotation is not None and (
                setting.key == key or (setting.is_dict and key.startswith(f"{setting.key}."))
            ):
                return setting
        return None

    def _name_words(self, plain: list[str], overrides: Tree) -> Tree:
        tree: Tree = {}
        for key in self.words:
            if plain and key not in overrides:
                many = _is_many(self.schema.model_fields[key])
                tree[key], plain = (plain, []) if many else (plain[0], plain[1:])
        if plain:
            raise UserError(f"'{redact(plain[0])}' is one word too many. Write: {self._usage()} [key=value ...]")
        return tree

    def _explain_option(self, word: str, rest: list[str]) -> str:
        """Options of argparse's kind: how they are written here."""
        name, _, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        setting = self._find(key)
        prog = command_name(self.prog)
        if word.partition("=")[0] in dict(self.options):
            return f"{word} stands beside {self.options[0][0]}: {prog} {self.options[0][0]} {word}"
        if setting is None:
            near = difflib.get_close_matches(key, [setting.key for setting in settings_of(self.schema)], 1)
            hint = f" Did you mean {near[0]}=...?" if near else ""
            return f"There is no option {word}.{hint} Settings are written as key=value; {prog} --help lists them."
        if not value and rest and not rest[0].startswith("-") and (not setting.values or rest[0] in setting.values):
            value = rest[0]
            word = f"{word} {value}"
        if setting.is_dict:
            return f"{word} is written {key}.{value or 'key=value'} here."
        usual = [shown for shown in setting.values if shown != str(setting.default)]
        return f"{word} is written {key}={value or (usual[0] if usual else key.upper())} here."

    def _usage(self) -> str:
        words = [f"{key.upper()}{'...' if _is_many(self.schema.model_fields[key]) else ''}" for key in self.words]
        return " ".join([command_name(self.prog), *words])

    def print_help(self) -> None:
        passed_on = f" [-- {self.passes_on}]" if self.passes_on else ""
        print(f"usage: {self._usage()} [--config FILE] [--print-config] [--help] [key=value ...]{passed_on}\n")
        print(f"{self.about}\n")
        for option, meaning in self.options:
            print(f"  {option}\n        {meaning}")
        if self.options:
            print()
        print("Later settings win: defaults, then FILE, then key=value. Settings (type, default, meaning):\n")
        for setting in settings_of(self.schema):
            indent = "    " if setting.choice and setting.annotation is not None else "  "
            if setting.key in self.words:
                head = f"{indent}{setting.key.upper()}"
            elif setting.annotation is None:
                head = f"{indent}{setting.key}"
            else:
                default = "required" if setting.required else f"default {_shown(setting.default)}"
                head = f"{indent}{setting.key} ({_type_name(setting.annotation)}, {default})"
            print(f"{head}\n        {setting.meaning}" if setting.meaning else head)
        if self.configs:
            print(f"\nConfig files that come along, for --config NAME: {', '.join(shipped_configs(self.configs))}.")


def split_passed_on(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """(what stands before the first `--`, what stands after it); None: there is no `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def shipped_configs(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def settings_of(schema: type[Settings], prefix: str = "", choice: str = "") -> Iterator[Setting]:
    """Every setting, in order. A group with a choice (method) lists each choice and its settings."""
    for key, field in schema.model_fields.items():
        models = models_of(field)
        if len(models) == 1:
            yield from settings_of(models[0], f"{prefix}{key}.", choice)
        elif models:
            for model in models:
                name = f"{prefix}{key}.name={model.model_fields['name'].default}"
                yield Setting(name, None, None, (model.__doc__ or "").strip().splitlines()[0], name)
                for setting in settings_of(model, f"{prefix}{key}.", name):
                    if setting.key != f"{prefix}{key}.name":
                        yield setting
        else:
            default = ... if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
            yield Setting(prefix + key, field.annotation, default, field.description or "", choice)


def _takes_text(setting: Setting, raw: str) -> bool:
    if raw[:1] in ("'", '"'):  # quotes are YAML's
        return False
    if setting.annotation in (str, Path) or setting.is_dict:
        return True
    return get_args(setting.annotation) == (str,) and raw[:1] != "["


def _is_many(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def _type_name(kind: Any) -> str:
    args = get_args(kind)
    if not args:
        return "none" if kind is type(None) else getattr(kind, "__name__", str(kind))
    if all(isinstance(a, str) for a in args):
        return " | ".join(args)
    if getattr(kind, "__origin__", None) in (list, tuple, dict):
        return f"{kind.__origin__.__name__}[{', '.join(_type_name(a) for a in args if a is not ...)}]"
    if hasattr(kind, "__metadata__"):  # Annotated
        return _type_name(args[0])
    return " | ".join(_type_name(a) for a in args if isinstance(a, type) or get_args(a))


def _shown(value: Any) -> str:
    return "''" if value == "" else str(list(value) if isinstance(value, tuple) else value)


def print_error(error: UserError) -> None:
    """One message on standard error, without secrets."""
    print(f"error: {redact(str(error))}", file=sys.stderr, flush=True)


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command: a UserError becomes one clear message and exit code 2; nothing else is hidden."""
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        if os.environ.get("EVENHAND_TRACEBACK"):
            traceback.print_exc()
        print_error(error)
        raise SystemExit(EXIT_USER_ERROR) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        print(interrupt.SENTENCE, file=sys.stderr)
        raise SystemExit(interrupt.EXIT_CODE) from None
    raise SystemExit(code or 0)
