"""Shell completion of `evenhand`: a small script for each shell, which asks `evenhand complete LINE` for the candidates."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.evenhand import COMMANDS, SHELLS

if TYPE_CHECKING:
    from shards.base.cli import Command, Setting

BASH = r"""# evenhand completion for bash:  source <(evenhand completion bash)
_evenhand() {
    local line=${COMP_LINE:0:COMP_POINT} word start="" candidate
    word=${line##*[[:space:]]}
    # readline replaces only what follows the last word break, and = and : are word breaks.
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then start=${word%=*}=; fi
    if [[ ${word#"$start"} == *:* && $COMP_WORDBREAKS == *:* ]]; then start=${word%:*}:; fi
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$start"}")
    done < <(command evenhand complete "$line" 2>/dev/null)
    # Something more follows a group, a key and a folder.
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[.=/] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _evenhand evenhand
"""
ZSH = r"""#compdef evenhand
# evenhand completion for zsh:  source <(evenhand completion zsh)   (after compinit)
_evenhand() {
    local -a more done
    local candidate
    for candidate in "${(@f)$(command evenhand complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}"; do
        case $candidate in
            '') ;;
            *[.=/]) more+=("$candidate") ;;
            *) done+=("$candidate") ;;
        esac
    done
    if (( ${#more} + ${#done} == 0 )); then
        [[ $PREFIX == *=* ]] && compset -P '*='
        _files
        return
    fi
    compadd -S '' -- $more
    compadd -- $done
}
compdef _evenhand evenhand
"""
FISH = r"""# evenhand completion for fish:  evenhand completion fish | source
complete -c evenhand -a '(command evenhand complete (commandline -cp | string collect) 2>/dev/null)'
"""
SCRIPTS = dict(zip(SHELLS, (BASH, ZSH, FISH)))


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become. Nothing: the shell offers files."""
    words = _split(line)
    if len(words) <= 2:
        return _starting(words[-1], [*COMMANDS, "completion", "--help", "--version"])
    name, before, current = words[1], words[2:-1], words[-1]
    if name == "completion":
        return _starting(current, SHELLS)
    if name not in COMMANDS:
        return []
    command = command_of(name)
    if "--" in before and command.passes_on:
        before, command = _passed_on(command, before)
    if before[-1:] == ["--config"] or current.startswith("--config="):
        return list(_config_files(current, command.configs))
    if current.startswith("-"):
        options = [
            "--config",
            "--print-config",
            "--help",
            *dict(command.options),
            *(["--"] if command.passes_on else []),
        ]
        return _starting(current, options)
    if "=" in current:
        return list(_values(command, current))
    return sorted(set(_keys(command, current, before)))


def command_of(name: str) -> Command[Any]:
    if name == "train":  # pipeline.train itself is not needed
        from pipeline.config import COMMAND

        return COMMAND
    command: Command[Any] = import_module(COMMANDS[name].module).COMMAND
    return command


def _split(line: str) -> list[str]:
    """The words of a command line that may end within quotes; the last one is being written."""
    for closing in ("", '"', "'"):
        try:
            words = shlex.split(line + closing)
            break
        except ValueError:
            continue
    else:
        words = line.split()
    return [*words, ""] if not words or (line[-1:].isspace() and not closing) else words


def _starting(current: str, words: list[str] | tuple[str, ...]) -> list[str]:
    return [word for word in words if word.startswith(current)]


def _passed_on(command: Command[Any], before: list[str]) -> tuple[list[str], Command[Any]]:
    at = before.index("--")
    name = "build" if "task=build" in before[:at] else "train"
    return before[at + 1 :], command_of(name)


def _config_files(current: str, configs: Path | None) -> Iterator[str]:
    option, equals, path = current.partition("=") if current.startswith("--config=") else ("", "", current)
    from shards.base.cli import shipped_configs

    if configs and "/" not in path:
        yield from (option + equals + name for name in _starting(path, shipped_configs(configs)))
    folder, _, start = path.rpartition("/")
    root = Path(folder + "/" if path.startswith("/") else folder or ".").expanduser()
    for file in sorted(root.glob("*")) if root.is_dir() else ():
        shown = f"{folder}/{file.name}" if "/" in path else file.name
        if file.name.startswith(start) and (start.startswith(".") or not file.name.startswith(".")):
            if file.is_dir():
                yield f"{option}{equals}{shown}/"
            elif file.suffix in (".yaml", ".yml"):
                yield f"{option}{equals}{shown}"


def _settings(command: Command[Any]) -> Iterator[Setting]:
    """The settings of a command; for a sweep also those of the training, as vary.KEY."""
    from shards.base.cli import settings_of

    for setting in settings_of(command.schema):
        if setting.is_dict and setting.key == "vary":
            for varied in settings_of(command_of("train").schema):
                choice = f"vary.{varied.choice}" if varied.choice else ""
                yield varied._replace(key=f"vary.{varied.key}", choice=choice)
        else:
            yield setting


def _values(command: Command[Any], current: str) -> Iterator[str]:
    """key=a, key=b: of a setting with few values, and of the name of a choice."""
    key, _, start = current.partition("=")
    for setting in _settings(command):
        if setting.annotation is None and setting.key.startswith(current):
            yield setting.key
        elif setting.annotation is not None and setting.key == key:
            yield from (f"{key}={value}" for value in setting.values if value.startswith(start))


def _keys(command: Command[Any], current: str, before: list[str]) -> Iterator[str]:
    """Keys one level deep: `tr` becomes `train.`, `train.ep` becomes `train.epochs=`."""
    for setting in _settings(command):
        if not setting.key.startswith(current):
            continue
        group = setting.choice.partition("=")[0]
        chosen = [word for word in before if group and word.startswith(f"{group}=")]
        if setting.choice and chosen and setting.choice != chosen[-1]:  # an option of another method
            continue
        key = setting.key.partition("=")[0]
        level = key[len(current) :].partition(".")
        yield current + level[0] + (level[1] or ("." if setting.is_dict else "="))
