"""The reference page of all settings: type, default and one line for every key, by section and component."""

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from fedsign.config import ExperimentConfig
from fedsign.registry import KINDS
from fedsign.sections import Part, Table, tables
from simulations.explain import EXPERIMENT, default_of, line_of, own_settings, settings_of, summary_of, type_of


def page() -> str:
    """The page, in Markdown."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    sections: list[tuple[str, type[Table]]] = [("", ExperimentConfig), *tables(ExperimentConfig)]
    kinds = {table.kind for _, table in sections if issubclass(table, Part)}
    yield from (
        "# Settings",
        "",
        "All keys of the configuration. `--set SECTION.KEY=VALUE` sets one; `fedsign run --show-config` prints those",
        "of an experiment. `module:Name` in place of a component's name takes yours; its parameters are its settings.",
    )
    for path, table in sections:
        yield from ("", f"## {f'[{path}]' if path else 'Experiment'} {{#{path or EXPERIMENT}}}", "")
        yield from (f"{_summary(table)}", "")
        yield from _rows(path or EXPERIMENT, path, own_settings(table))
        if issubclass(table, Part):
            yield from _components(path, table.kind)
    yield from (
        "",
        "## Named without settings of a section {#other}",
        "",
        "Tasks, metrics and callbacks are named at the top of",
    )
    yield "the configuration; objectives and hypergradients by strategies, controls and condensation."
    for kind in KINDS:
        if kind not in kinds:
            yield from ("", f"### {_title(kind)} {{#{kind}}}")
            yield from _components(kind, kind)


def _components(path: str, kind: str) -> Iterator[str]:
    plain = []
    for name, (_, text) in KINDS[kind].table.items():
        if fields := settings_of(kind, name):
            yield from ("", f'### `{path}.name = "{name}"` {{#{path}.{name}}}', "", f"{_sentence(text)}", "")
            yield from _rows(f"{path}.{name}", path, fields, kind=kind, name=name)
        else:
            plain.append(f'- <span id="{path}.{name}"></span>`{name}`: {text}')
    if plain:
        yield from ("", "Without settings:", "", *plain)


def _rows(anchor: str, path: str, fields: dict[str, FieldInfo], *, kind: str = "", name: str = "") -> Iterator[str]:
    if not fields:
        return
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for key, field in fields.items():
        line = line_of(key, kind=kind, name=name) if kind else line_of(key, section=path)
        id_ = f'<span id="{anchor}.{key}"></span>'
        cells = f"{id_}`{key}`", f"`{type_of(field)}`", default_of(field), line or ""
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _title(kind: str) -> str:
    return KINDS[kind].plural.replace("_", " ").capitalize()


def _summary(table: type[Table]) -> str:
    return "Keys at the top of the file." if table is ExperimentConfig else summary_of(table)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
