"""Reads a ``Config`` from YAML text and command-line options; errors name the file, the line and the key.

The file is composed into nodes and not constructed into objects, because nodes keep their line, repeated
keys, and the text as it was written.

Drop-ins, in the directory ``config.d`` next to the configuration file, are merged over the file in the order
of their names, key by key: keys with values are merged, at any depth, and everything else (words, numbers,
lists) is replaced as a whole. So a drop-in can add or replace an entry of ``hooks.settings``, but cannot
remove one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from proxy.config.checks import check, configuration_error
from proxy.config.cluster_config import IGNORED, cluster_config_file, forbidden
from proxy.config.former_keys import rename_former_keys
from proxy.config.nested_values import SettingError, YamlNode, suggestion, type_text
from proxy.config.schema import API_VERSION, KIND, Config, Setting, keys
from proxy.model.errors import ConfigError, PermissionDeniedError, TopoproxyError, UsageError
from proxy.open_file import open_file
from proxy.permissions import TrustCheck

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")

DEFAULT_FILE = Path("/etc/topoproxy/config.yaml")
SIZE_LIMIT = 1 << 20
_HEADER = {"apiVersion": API_VERSION, "kind": KIND}

DIRECTORY_NAME = "config.d"
SUFFIX = ".yaml"
MOST_FILES = 100


def drop_in_directory(file: Path) -> Path:
    """Return the drop-in directory of a configuration file."""
    return file.parent / DIRECTORY_NAME


def drop_in_files(file: Path) -> list[Path]:
    """Return the drop-ins of a configuration file in their order.

    Hidden files, and names that do not end with ``SUFFIX``, do not count.

    Raises:
        ConfigError: The directory cannot be read, or has too many files.
        PermissionDeniedError: The directory may not be read.
    """
    directory = drop_in_directory(file)
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read the configuration {directory}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {directory}: {error.strerror}") from error
    files = [directory / name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if len(files) > MOST_FILES:
        raise ConfigError(f"cannot use the configuration {directory}: it has more than {MOST_FILES} files")
    return files


def merged_nodes(base: yaml.Node, over: yaml.Node) -> yaml.Node:
    """Return two valid files as one; each node keeps its place in its file."""
    import yaml

    if not isinstance(base, yaml.MappingNode) or not isinstance(over, yaml.MappingNode):
        return over
    entries = {key.value: (key, value) for key, value in base.value}
    for key, value in over.value:
        existing = entries.get(key.value)
        entries[key.value] = (key, value if existing is None else merged_nodes(existing[1], value))
    return yaml.MappingNode(over.tag, list(entries.values()), over.start_mark, over.end_mark)


def load(
    path: Path | None = None,
    default: Path = DEFAULT_FILE,
    *,
    trusted: bool = False,
    cluster: str | None = None,
) -> Config:
    """Read the configuration file and its drop-ins.

    Args:
        path: A file that the user named; None for the default path, where the file may be missing.
        default: The default path.
        trusted: Refuse a file that another user could have written, because the daemon follows it.
        cluster: The settings of the cluster as text, instead of its file; a fault in them is an error.

    Returns:
        The configuration; all defaults if the file at the default path does not exist.

    Raises:
        ConfigError: The named file is missing, or a file is unreadable, refused or not trusted.
        PermissionDeniedError: A file may not be read.
    """
    file = path if path is not None else default
    texts = {drop_in: _read_text(drop_in, trusted) for drop_in in drop_in_files(file)}
    try:
        texts = {file: _read_text(file, trusted), **texts}
    except _MissingFileError:
        if path is not None:
            raise
    if not texts:
        return Config()
    former: list[str] = []
    root, source = _merged_files(file, texts, former)
    own = replace(_checked(root, source, []), former_keys=tuple(former))
    if cluster is not None:
        return _merged(own, root, cluster)
    return _with_cluster(own, root, _cluster_text(own, trusted))


def _cluster_text(own_config: Config, trusted: bool) -> str | TopoproxyError | None:
    """Return the settings of the cluster as text; None for none, or an error if they cannot be read."""
    file = cluster_config_file(own_config.cluster_facts.directory, own_config.cluster_config.allowed)
    try:
        return None if file is None else _read_text(file, trusted)
    except _MissingFileError:
        return None
    except TopoproxyError as error:
        return error


def _with_cluster(
    own_config: Config, root: yaml.Node | None, cluster_text: str | TopoproxyError | None
) -> Config:
    """Return a configuration with the settings of the cluster, or without them if they are refused."""
    if cluster_text is None:
        return own_config
    try:
        if isinstance(cluster_text, TopoproxyError):
            raise cluster_text
        return _merged(own_config, root, cluster_text)
    except TopoproxyError as error:
        return replace(own_config, cluster_fault=f"{IGNORED}: {error}")


def _merged(own_config: Config, root: yaml.Node | None, text: str) -> Config:
    """Merge the settings of the cluster over the configuration of the node.

    Raises:
        ConfigError: They are refused.
    """
    problems: list[str] = []
    source = f"{own_config.source} with the settings from the cluster"
    over = _parsed_nodes(text, "cluster", problems)
    if over is None or root is None:
        if problems:
            raise configuration_error(source, problems)
        return own_config
    for node, name in forbidden(over, own_config.cluster_config.allowed, own_config):
        problems.append(f"{_line(node)}: {name}: this node does not permit it (clusterConfig.allowed)")
    _read_mapping(over, Config(), "", problems)
    if problems:
        raise configuration_error(source, problems)
    return replace(
        _checked(merged_nodes(root, over), source, []),
        without_cluster=own_config,
        former_keys=own_config.former_keys,
    )


class _MissingFileError(ConfigError):
    """There is no such file."""


def _read_text(file: Path, trusted: bool) -> str:
    try:
        with open_file(file) as stream:
            if trusted and (problem := _distrust(file, stream.fileno())):
                raise ConfigError(f"cannot trust the configuration {file}: {problem}")
            data = stream.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        raise _MissingFileError(f"cannot read the configuration {file}: there is no such file") from None
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read the configuration {file}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from error
    if len(data) > SIZE_LIMIT:
        raise ConfigError(f"cannot use the configuration {file}: it is larger than {SIZE_LIMIT} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot use the configuration {file}: byte {error.start} is not UTF-8") from error


def distrust(path: Path | None = None) -> str:
    """Describe in a sentence why ``load`` would not trust a file or a drop-in; empty if it would."""
    file = path if path is not None else DEFAULT_FILE
    for drop_in in (file, *drop_in_files(file)):
        try:
            with open_file(drop_in) as stream:
                if problem := _distrust(drop_in, stream.fileno()):
                    return problem
        except OSError:
            continue
    return ""


def _distrust(file: Path, descriptor: int) -> str:
    """Check the directories of the path, and the file that was opened."""
    permissions = TrustCheck()
    return permissions.path_problem(file, sticky=True) or permissions.writer_problem(
        file, os.fstat(descriptor)
    )


def parse(text: str, source: str) -> Config:
    """Read YAML text.

    Args:
        text: The content of a configuration file.
        source: Its name in messages.

    Raises:
        ConfigError: All problems of the text, one on each line.
    """
    problems: list[str] = []
    root = _parsed_nodes(text, "", problems)
    former = rename_former_keys(root)
    return replace(_checked(root, source, problems), former_keys=tuple(former))


def _merged_files(file: Path, texts: Mapping[Path, str], former: list[str]) -> tuple[yaml.Node | None, str]:
    """Read a file and its drop-ins, each by itself first, because replaced settings must be valid too.

    Args:
        file: The file.
        texts: The content of the file and of its drop-ins.
        former: Gets a sentence for each key that was renamed.

    Returns:
        The merged nodes, and their name in messages.

    Raises:
        ConfigError: One of them is invalid.
    """
    problems: list[str] = []
    if texts.keys() == {file}:
        root = _parsed_nodes(texts[file], "", problems)
        if problems:
            raise configuration_error(str(file), problems)
        former += rename_former_keys(root)
        return root, str(file)
    whole: yaml.Node | None = None
    for path, text in texts.items():
        root = _parsed_nodes(text, str(path.relative_to(file.parent)), problems)
        former += rename_former_keys(root)
        if root is not None:
            _read_mapping(root, Config(), "", problems)
        if root is not None and not problems:
            whole = root if whole is None else merged_nodes(whole, root)
    if problems:
        raise configuration_error(str(file), problems)
    names = ", ".join(path.name for path in texts if path != file)
    return whole, f"{file} with {DIRECTORY_NAME}/{names}"


def _parsed_nodes(text: str, name: str, problems: list[str]) -> yaml.Node | None:
    """Return the nodes of a file; None if it is empty, or not YAML, which is added to ``problems``."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        loader.name = name
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        problems.append(f"{_place(name, line)}: not YAML: {error.problem or error.context}")
    except RecursionError:
        problems.append(f"{name}{': ' if name else ''}it is nested too deeply")
    except yaml.YAMLError as error:
        problems.append(f"{name}{': ' if name else ''}not YAML: {str(error).splitlines()[0]}")
    return None


def _checked(root: yaml.Node | None, source: str, problems: list[str]) -> Config:
    config = Config(source=source)
    if root is not None:
        config = replace(_read_mapping(root, Config(), "", problems), source=source)
    if not problems:
        problems = check(config)
    if problems:
        raise configuration_error(source, problems)
    return config


def override(config: Config, values: Mapping[str, tuple[str, str | None]]) -> Config:
    """Replace settings by options of the command line.

    Args:
        config: The configuration from the files.
        values: Key (``log.level`` for one of a section) to the option's name and its text (None: leave).

    Raises:
        UsageError: An option is refused.
    """
    for key, (option, text) in values.items():
        if text is None:
            continue
        section, _, name = key.rpartition(".")
        place = next((f.name for f, k, s in keys(config) if k == section and s is None), "")
        part: Any = getattr(config, place) if section else config
        field, setting = next((f, s) for f, k, s in keys(part) if k == name and s is not None)
        if setting.kind.nested:
            raise UsageError(f"cannot use {option}: only a file can set {key}")
        try:
            changed = replace(part, **{field.name: setting.kind.read(text)})
        except ValueError as error:
            raise UsageError(f"cannot use {option}: {error}") from error
        config = replace(config, **{place: changed}) if section else changed
    problems = check(config)
    if problems:
        raise UsageError(f"cannot use the settings together: {'; '.join(problems)}")
    return (
        config
        if config.without_cluster is None
        else replace(config, without_cluster=override(config.without_cluster, values))
    )


def _read_mapping(node: yaml.Node, defaults: T, prefix: str, problems: list[str]) -> T:
    """Read a YAML mapping over the defaults of a section; faults are added to ``problems``."""
    import yaml

    where = f"{_line(node)}: {prefix.rstrip('.')}" if prefix else _line(node)
    if not isinstance(node, yaml.MappingNode):
        problems.append(f"{where}: must be keys with values, not {type_text(node)}")
        return defaults
    known_keys = {key: (item, setting) for item, key, setting in keys(defaults)}
    header = {} if prefix else _HEADER
    first_lines: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for key_node, value in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        where = f"{_line(key_node)}: {prefix}{key}"
        if key in first_lines:
            problems.append(f"{where}: given twice, first on {first_lines[key]}")
        elif key in header:
            if not isinstance(value, yaml.ScalarNode) or value.value != header[key]:
                problems.append(f"{where}: must be {header[key]} (or be left out)")
        elif key not in known_keys:
            problems.append(f"{where}: unknown key{_key_suggestion(key, [*known_keys, *header], prefix)}")
        else:
            field, setting = known_keys[key]
            if setting is None:
                changes[field.name] = _read_mapping(value, getattr(defaults, field.name), f"{key}.", problems)
            else:
                _read_value(value, setting, field.name, where, changes, problems)
        first_lines.setdefault(key, _line(key_node))
    return replace(defaults, **changes)  # type: ignore[type-var]  # T is a dataclass, which no bound can say


def _read_value(
    node: yaml.Node, setting: Setting, name: str, where: str, changes: dict[str, Any], problems: list[str]
) -> None:
    kind, tag = setting.kind, node.tag.rpartition(":")[2]
    if tag == "null":
        problems.append(f"{where}: has no value (leave the key out for the default)")
        return
    if tag not in kind.tags:
        problems.append(f"{where}: must be {kind.wants}, not {type_text(node)}")
        return
    try:
        changes[name] = kind.read(YamlNode(node) if kind.nested else node.value)
    except SettingError as fault:
        place = _place(node.start_mark.name, fault.line)
        problems.append(f"{place}: {where.partition(': ')[2]}{fault.path}: {fault}")
    except ValueError as error:
        problems.append(f"{where}: {error}")


def _line(node: yaml.Node) -> str:
    return _place(node.start_mark.name, node.start_mark.line + 1)


def _place(name: str, line: int) -> str:
    return f"{name}, line {line}" if name else f"line {line}"


def _key_suggestion(key: str, known: list[str], prefix: str) -> str:
    """Suggest the key that was probably intended, including keys of a section."""
    for item, section, setting in keys(Config):
        if setting is None and not prefix and key in {k for _, k, _ in keys(getattr(Config(), item.name))}:
            return f"; did you mean {section}.{key}?"
    return suggestion(key, known, prefix)
